"""Print the most likely tokens of the masks in a text."""

import json

from mini_gpt.commands.generate.request import check_tokens, escaped, warn_if_longer_than_trained
from mini_gpt.data import tokenizers
from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.generation import filling
from mini_gpt.training.run import Run


def write(run: Run, text: str, top: int, as_json: bool) -> None:
    """Print the `top` most likely tokens of each mask with their probabilities, then the text with the best ones."""
    tokens_L = filling.encode(run.tokenizer, text)
    check_tokens("--fill", tokens_L)
    warn_if_longer_than_trained(run, len(tokens_L))
    found = filling.fill(run.model, tokens_L, top)
    filled = run.tokenizer.decode(found.tokens_L)
    masks = [
        [
            {"token": token, "text": run.tokenizer.decode([token]), "probability": probability}
            for token, probability in zip(tokens_K, probabilities_K, strict=True)
        ]
        for tokens_K, probabilities_K in zip(found.best_NK.tolist(), found.probabilities_NK.tolist(), strict=True)
    ]
    if as_json:
        print(json.dumps({"fill": text, "text": filled, "masks": masks}, ensure_ascii=False))
        return
    for number, best in enumerate(masks, 1):
        print(f"--- mask {number} of {len(masks)}")
        for one in best:
            print(f"{one['probability']:.4f}  {_shown(run.tokenizer, one['token'])}")
    print(f"--- text\n{escaped(filled)}")


def _shown(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text in quotes, its bytes if they are a part of a character, or the meaning of the separator."""
    if token == tokenizers.separator(tokenizer):
        return "end of document"
    content = tokenizer.texts[token]
    try:
        return repr(content.decode())
    except UnicodeDecodeError:
        return repr(content)
