"""`python -m fly_cli.convert SOURCE.gguf FOLDER`: a GGUF file as a bf16 safetensors model folder.

A program of its own, because unpacking needs several times the file in memory: the process gives it all back,
and when the system kills it for memory, `fly` lives on to say so. It prints one JSON line a step on stdout:
`{"step": ...}`, and at the end `{"done": true}` or `{"error": ..., "hint": ..., "kind": ...}`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from .errors import FlyError, ModelError, UnsupportedModelError

# A GGUF file names one end token, chat models have several: these end an answer wherever they are control tokens.
END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")


def convert(source: Path, folder: Path) -> None:
    """Write model, generation config, tokenizer and chat template of `source` into `folder`.

    Raises `UnsupportedModelError` for an architecture that transformers cannot unpack into a causal language
    model, `ModelError` when weights are missing.
    """
    report(step="reading the tokenizer")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

    logging.disable_progress_bar()
    check_architecture(source)
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    report(step="unpacking the weights to bf16")
    model, info = AutoModelForCausalLM.from_pretrained(
        **place,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        output_loading_info=True,
        trust_remote_code=False,
    )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"`{source.name}` lacks {len(missing)} weights of its architecture: {', '.join(missing[:5])}",
            hint="download the file again, or use another conversion of the model",
        )
    model.generation_config.eos_token_id = end_ids(model.generation_config.eos_token_id, tokenizer)
    report(step="writing the converted model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    open_to_readers(folder)


def check_architecture(source: Path) -> None:
    """Refuse what this version of transformers cannot unpack, before it reads any tensor."""
    from transformers.integrations.gguf import GGUF_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    from .gguf_header import read_header

    architecture = read_header(source).architecture
    known = {name.replace("_", "") for name in (*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_ARCHS)}
    known -= {"general", "tokenizer", "t5", "umt5"}  # sections of the file, and models that are not causal
    if architecture.replace("_", "").replace("-", "") not in known:
        import transformers

        raise UnsupportedModelError(
            f"`{source.name}` holds a model of architecture `{architecture}`, "
            f"which transformers {transformers.__version__} cannot read from a GGUF file",
            hint="use the model's safetensors instead: its folder, or its hub id",
        )


def end_ids(named: int | list[int] | None, tokenizer: Any) -> list[int] | None:
    """All ids that end an answer: the one that the file names, and the usual ones among its control tokens."""
    ids = [named] if isinstance(named, int) else list(named or [])
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids += [special[text] for text in END_TEXTS if text in special and special[text] not in ids]
    return ids or None


def open_to_readers(folder: Path) -> None:
    """Give every file the mode that the umask grants: safetensors are written for their owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~umask)


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main(source: str, folder: str) -> int:
    """What the process returns; the last line on stdout says how it went."""
    try:
        convert(Path(source), Path(folder))
    except FlyError as error:
        report(error=error.message, hint=error.hint, kind=type(error).__name__)
        return 1
    report(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
