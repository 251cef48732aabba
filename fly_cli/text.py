"""Prompts to ids, and which ids mean what: with `detokenize`, the only file that knows how a tokenizer works."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .detokenize import Detokenizer, choose_detokenizer, decode_all, token_at
from .errors import PromptError, SettingsError, UnsupportedModelError
from .prompts import Prompt, replace_surrogates
from .settings import TextSettings, is_template_name
from .templates import refuse_endless

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"

# Names under which model families mark the end of a turn or of a text. They count where the vocabulary has them as
# added tokens, since a checkpoint's own lists of end ids are often incomplete.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|eot|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek: full-width bars, lower one-eighth blocks
    "<eos>",
    "</s>",
)
# Ordinary added tokens that switch the model's channel: thoughts and tool calls.
SWITCH_TOKEN = re.compile(r"[<\[].*(think|thought|reason|tool|function|call|channel).*[>\]]", re.IGNORECASE)
GGUF_PLACEHOLDER = re.compile(r"\[PAD(\d+)\]")  # fills the rows of a GGUF vocabulary that have no token


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of a prompt, what the user should know about them, and where the chat template came from."""

    ids: tuple[int, ...]
    notes: tuple[str, ...] = ()
    template_source: str | None = None  # None: no template was used


class Codec:
    """A target's tokenizer, as this tool uses it.

    `end_ids` are the generation config's end ids (an int, a list or None), `vocab_rows` the rows of the model's
    embedding. Raises `SettingsError` for a stop token that does not exist, and for a system message or template
    name that the tokenizer has no use for; `UnsupportedModelError` for a template that is none or never ends.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        settings: TextSettings,
        end_ids: int | Iterable[int] | None,
        vocab_rows: int,
    ):
        self.tokenizer = tokenizer
        self.settings = settings
        self.vocab_rows = vocab_rows
        self.vocab_size: int = selectable_ids(tokenizer, vocab_rows)
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        switches = {token_id for token_id, token in added.items() if SWITCH_TOKEN.fullmatch(token.content)}
        self.stop_ids: frozenset[int] = self._find_stop_ids(end_ids, added)
        # Special ids include bos and pad: tokenizers list every named special token.
        self.protected_ids: frozenset[int] = frozenset(special | switches | self.stop_ids)
        self.special_ids: frozenset[int] = frozenset(special | self.stop_ids)  # those that are no text
        self.hidden_ids: frozenset[int] = frozenset() if settings.show_special else self.special_ids
        self._template, self._template_source = (None, None) if settings.raw else choose_template(tokenizer, settings)
        if self._template is not None:
            refuse_endless(self._template, tokenizer.special_tokens_map)
        if settings.system is not None and self._template is None:
            raise SettingsError(
                "the model has no chat template, so a system message has no place",
                hint="give one with `--chat-template FILE`, or drop `--system` (`--raw` says that plain text is meant)",
            )
        markers = sorted((token.content for token in added.values() if token.content.strip()), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, markers)) or "(?!)")  # (?!) matches nothing
        self._new_detokenizer = choose_detokenizer(tokenizer, self.vocab_size)

    # --- prompts to ids

    @property
    def chats(self) -> bool:
        """Whether prompts are sent as chats, by a template."""
        return self._template is not None

    def encode(self, prompt: Prompt) -> Encoded:
        """The ids to send for the prompt. Raises `PromptError` where there is nothing to send, or no way to."""
        if self._template is not None:
            encoded = self._encode_chat(prompt)
        elif prompt.messages is not None:
            reason = "which `--raw` cannot send" if self.settings.raw else "and the model has no chat template"
            raise PromptError(
                f"prompt `{prompt.id}` is a chat, {reason}",
                hint="give a template with `--chat-template FILE`, or write the text as one prompt and use `--raw`",
            )
        else:
            encoded = self._encode_plain(prompt)
        if not encoded.ids:
            raise PromptError(f"the prompt `{prompt.id}` is empty", hint="this model needs at least one token to begin")
        if (highest := max(encoded.ids)) >= self.vocab_rows:
            raise PromptError(
                f"the prompt `{prompt.id}` has token id {highest}, and the model knows {self.vocab_rows} ids",
                hint="the tokenizer does not belong to this model",
            )
        return encoded

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """A plain text that is the whole prompt, template or not, behind the tokenizer's own start token."""
        return self._encode_plain(Prompt("plain", text=text)).ids

    def piece_ids(self, text: str) -> list[int]:
        """A piece of plain text: nothing is put in front of it or behind it, and special tokens in it are text."""
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        return [int(token_id) for token_id in ids]

    def _encode_plain(self, prompt: Prompt) -> Encoded:
        """The text as it is, with the start token that the tokenizer itself puts in front."""
        text, notes = _mend(prompt.text or "")
        if not self.settings.raw:
            if prompt.is_blank():
                return Encoded(())
            notes.append("the model has no chat template: the prompt was sent as plain text")
        bare = self._ids(text, add_special_tokens=False)
        front, behind = self._own_specials()
        if front and bare and front[-1] == bare[0] == self.tokenizer.bos_token_id:
            notes.append("the prompt begins with the start token itself, so none was added")
            front.pop()
        while behind and behind[-1] in self.stop_ids:
            behind.pop()
            if not behind or behind[-1] not in self.stop_ids:
                notes.append("the tokenizer puts an end token behind the prompt; it was dropped")
        return Encoded((*front, *bare, *behind), tuple(notes))

    def _own_specials(self) -> tuple[list[int], list[int]]:
        """What the tokenizer itself puts in front of a text, and behind it."""
        bare = self._ids("a", add_special_tokens=False)
        full = self._ids("a", add_special_tokens=True)
        at = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
        return full[:at], full[at + len(bare) :]

    def _encode_chat(self, prompt: Prompt) -> Encoded:
        """The chat as the template writes it, its own start token included or not."""
        if prompt.is_blank():
            return Encoded(())
        messages, notes = self._messages(prompt)
        text, messages = self._render(messages, notes)
        ids = None
        if any(self._marker.search(value) for message in messages for value in message.values()):
            ids = self._ids_with_markers_as_text(messages, notes)
        if ids is None:
            ids = self._ids(text, add_special_tokens=False)
        return Encoded(tuple(ids), tuple(notes), self._template_source)

    def _messages(self, prompt: Prompt) -> tuple[list[dict[str, str]], list[str]]:
        messages = [dict(message) for message in prompt.messages or [{"role": "user", "content": prompt.text or ""}]]
        notes: list[str] = []
        if self.settings.system is not None:
            if messages[0]["role"] == "system":
                notes.append(f"`{prompt.id}` has its own system message, so `--system` was left out")
            else:
                messages.insert(0, {"role": "system", "content": self.settings.system})
        for message in messages:
            for key, value in message.items():
                message[key], new_notes = _mend(value)
                notes += new_notes
        return messages, list(dict.fromkeys(notes))

    def _render(self, messages: list[dict[str, str]], notes: list[str]) -> tuple[str, list[dict[str, str]]]:
        """The chat as text, and the messages it shows: a system message may move into the first user turn."""
        text, failure = self._try_template(messages)
        if text is not None and not self._leaves_out_system(messages, text):
            return text, messages
        folded = _fold_system(messages)
        folded_text = self._try_template(folded)[0] if folded else None
        if folded and folded_text is not None:
            reason = f"refuses the system message ({failure})" if failure else "leaves out the system message"
            notes.append(f"the chat template {reason}: it was put in front of the first user turn")
            return folded_text, folded
        if text is not None:
            return text, messages
        raise PromptError(
            f"the chat template refuses this prompt: {failure}",
            hint="change the roles of its messages, or use `--chat-template FILE` or `--raw`",
        )

    def _leaves_out_system(self, messages: list[dict[str, str]], text: str) -> bool:
        if messages[0]["role"] != "system" or messages[0]["content"].strip() in text:
            return False
        return self._try_template(messages[1:])[0] == text

    def _try_template(self, messages: list[dict[str, str]]) -> tuple[str | None, str | None]:
        """The rendered chat, or None and the template's own message."""
        try:
            return str(self._apply_template(messages, tokenize=False)), None
        except Exception as error:  # a template is a program that came with the checkpoint: it may raise anything
            return None, one_line(error)

    def _ids_with_markers_as_text(self, messages: list[dict[str, str]], notes: list[str]) -> list[int] | None:
        """The chat's ids with control markers inside contents as plain text; None where the tokenizer cannot."""
        try:
            ids = self._apply_template(messages, tokenize=True, return_dict=False, sanitize_control_tokens=True)
        except Exception as error:
            notes.append(f"the prompt spells a control token, and it acts as one ({one_line(error)})")
            return None
        return [int(token_id) for token_id in ids]

    def _apply_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            messages, chat_template=self._template, add_generation_prompt=True, **options
        )

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # verbose=False: no warning about a model's maximum length, which the decoder checks itself
        ids = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return [int(token_id) for token_id in ids]

    # --- ids to text

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for the ids behind this prompt. Ids without a token of their own give no text."""
        return self._new_detokenizer(self.hidden_ids, prompt_ids)

    def token_text(self, token_id: int) -> str:
        """The text of one id by itself, special or not."""
        return decode_all(self.tokenizer, [token_id]) if token_id < self.vocab_size else ""

    # --- special ids

    def _find_stop_ids(self, end_ids: int | Iterable[int] | None, added: Mapping[int, Any]) -> frozenset[int]:
        listed = [end_ids] if isinstance(end_ids, int) else list(end_ids or ())
        eos = self.tokenizer.eos_token_id
        known = [token_id for token_id, token in added.items() if token.content in END_TOKENS]
        own = [self._stop_token_id(token) for token in self.settings.stop_token]
        ids = {*listed, *known, *own, *([] if eos is None else [eos])}
        return frozenset(token_id for token_id in ids if 0 <= token_id < self.vocab_rows)

    def _stop_token_id(self, token: str) -> int:
        """The id of a user's stop token: ASCII digits are an id, anything else is a token's text."""
        if token.isascii() and token.isdigit():
            digits = token.lstrip("0") or "0"
            if len(digits) <= len(str(self.vocab_size)) and int(digits) < self.vocab_size:  # int() bears no 5000 digits
                return int(digits)
            raise SettingsError(f"stop token {token} does not exist", hint=f"ids go from 0 to {self.vocab_size - 1}")
        token = replace_surrogates(token)
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        if isinstance(token_id, int) and self.tokenizer.convert_ids_to_tokens(token_id) == token:
            return token_id
        ids = self._ids(token, add_special_tokens=False)
        if len(ids) == 1 and decode_all(self.tokenizer, ids).strip() == token.strip():
            return ids[0]
        raise SettingsError(
            f"stop token {token!r} is not one token of this model",
            hint="give a token of its vocabulary or an id, or use `--stop` for a text",
        )


def choose_template(tokenizer: PreTrainedTokenizerBase, settings: TextSettings) -> tuple[str | None, str | None]:
    """The chat template's text and where it came from; two Nones for a model without one."""
    own = getattr(tokenizer, "chat_template", None)
    named = own if isinstance(own, dict) else {}
    if not all(isinstance(text, str) for text in (*named, *named.values(), own if own and not named else "")):
        raise UnsupportedModelError(
            "the model's chat template is not a text", hint=f"mend `chat_template` in its {CONFIG_FILE}"
        )
    names = ", ".join(f"`{name}`" for name in sorted(named))
    if settings.chat_template is not None:
        if settings.chat_template in named:
            return named[settings.chat_template], f"named template `{settings.chat_template}`"
        if is_template_name(settings.chat_template):
            raise SettingsError(
                f"the model has no chat template named `{settings.chat_template}`",
                hint=f"it has {names}" if named else "give a file with a Jinja template",
            )
        return settings.chat_template, "--chat-template"
    if named:
        if "default" not in named:
            raise SettingsError(
                f"the model has several chat templates and no default: {names}", hint="name one with `--chat-template`"
            )
        return named["default"], "named template `default`"
    if own is None:
        return None, None
    # Loading leaves no trace of where it found the template: ask the folder again, in the order of the loader.
    folder = Path(str(tokenizer.name_or_path or ""))
    if (folder / TEMPLATE_FILE).is_file():
        return own, TEMPLATE_FILE
    if (folder / CONFIG_FILE).is_file() and '"chat_template"' in (folder / CONFIG_FILE).read_text(encoding="utf-8"):
        return own, CONFIG_FILE
    return own, "tokenizer"  # a hub id, GGUF metadata, or a tokenizer built in code


def selectable_ids(tokenizer: PreTrainedTokenizerBase, vocab_rows: int) -> int:
    """1 + the highest id with a token of its own; rows above it pad the embedding and must never be chosen."""
    known = (token_id for token_id in tokenizer.get_vocab().values() if token_id < vocab_rows)
    for token_id in sorted(known, reverse=True):
        token = token_at(tokenizer, token_id)
        placeholder = GGUF_PLACEHOLDER.fullmatch(token) if token is not None else None
        if token is not None and not (placeholder and int(placeholder[1]) == token_id):
            return int(token_id) + 1
    raise SettingsError("the tokenizer knows none of the model's ids", hint="give the tokenizer of this model")


def _mend(text: str) -> tuple[str, list[str]]:
    mended = replace_surrogates(text)
    return mended, [] if mended == text else ["the prompt has characters that are not Unicode; they became U+FFFD"]


def _fold_system(messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """The messages with the system message in front of the first user turn; None where there is no such pair."""
    if messages[0]["role"] != "system":
        return None
    system, *rest = messages
    for at, message in enumerate(rest):
        if message["role"] == "user":
            folded = {**message, "content": f"{system['content']}\n\n{message['content']}"}
            return [*rest[:at], folded, *rest[at + 1 :]]
    return None


def one_line(error: BaseException, longest: int = 300) -> str:
    """What an error says, on one line that is not too long to read."""
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        line = f"unknown key {line}"
    return line if len(line) <= longest else f"{line[:longest]}..."
