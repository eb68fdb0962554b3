"""What follows from the config and the tokenizer of a run: the layout of its tokens, and their number."""

from mini_gpt.config.schema import Config
from mini_gpt.data import tokenizers
from mini_gpt.data.layout import Layout
from mini_gpt.data.tokenizers import Tokenizer


def layout_of(config: Config, tokenizer: Tokenizer) -> Layout:
    """Return the layout of the tokens of a corpus. Operators are all characters but letters and digits.

    With an encoder, each row of sources and of targets has several pairs, and each text starts with a separator. Span
    corruption has one pair per row, and its text may have separators of documents.
    """
    data, has_pairs = config.data, config.model.has_encoder and not config.objective_class.corrupts
    separator_id = tokenizers.separator(tokenizer) if data.isolate_documents or has_pairs else None
    mask_id = tokenizer.mask_id if config.objective_class.masks else None
    first_id = None if has_pairs else tokenizer.first  # pairs begin with the separator, or with start_id
    start_id = tokenizer.start if has_pairs else first_id  # an isolated document begins as a row does
    start_id = start_id if separator_id is not None else None
    layout = Layout(separator_id, start_id=start_id, first_id=first_id, mask_id=mask_id)
    if data.position_ids == "sequence":
        return layout
    characters = [text.decode() for text in tokenizer.texts]
    return layout._replace(operator_ids=tuple(i for i, text in enumerate(characters) if not text.isalnum()))


def vocab_size(config: Config, tokenizer: Tokenizer) -> int:
    """Return the number of tokens of the model: those of the tokenizer, and those that the objective adds."""
    return tokenizers.vocab_size(tokenizer) + (config.objective_class.extra_tokens if tokenizer.mask_id is None else 0)
