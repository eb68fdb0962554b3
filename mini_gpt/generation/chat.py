"""Chats: a message in the format of a model, by the chat template of its tokenizer."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from mini_gpt.data.tokenizers import Tokenizer
from mini_gpt.runtime.errors import UserError

PROGRAM = Path(__file__).with_name("render_chat.py")
LONGEST_WAIT = 60  # seconds, for a process with a limit of its own on processor time


def encode(message: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of a chat with one message of the user, up to the start of the answer.

    Special tokens are those of the template and of the message; none is added. Raises the errors of `render`.
    """
    return tokenizer.encode_prompt(render(message, tokenizer), add_special_tokens=False)


def render(message: str, tokenizer: Tokenizer) -> str:
    """Return the text of a chat with one message of the user, up to the start of the answer.

    Raises UserError if the tokenizer has no chat template, or if the template fails or exceeds a limit.
    """
    template = tokenizer.source.template
    if template is None:
        remedy = "only runs of an imported model with a chat template have one; give the whole prompt, without --chat"
        raise UserError(f"--chat: the run has no chat template; {remedy}")
    variables = {"messages": [{"role": "user", "content": message}], "tools": None, "documents": None}
    asked = {"template": template, "variables": {**tokenizer.special, **variables, "add_generation_prompt": True}}
    command, content = [sys.executable, "-P", str(PROGRAM)], json.dumps(asked).encode()
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=LONGEST_WAIT)
    except subprocess.TimeoutExpired:
        raise _error(f"more than {LONGEST_WAIT} seconds") from None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _error("more processor time or memory than the limit")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        reason = (done.stderr.decode(errors="replace").splitlines() or [f"exit status {done.returncode}"])[-1]
        raise _error(reason) from None
    if "error" in answer:
        raise _error(answer["error"])
    return answer["text"]


def _error(reason: str) -> UserError:
    return UserError(f"--chat: the chat template of the run failed ({reason}); give the whole prompt, without --chat")
