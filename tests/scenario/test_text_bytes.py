"""Files as other systems write them: every kind reads UTF-16, marks, Windows line ends and gzip as the plain text."""

import bz2
import gzip
import json
import lzma
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from topo_texts import matrix_text

from mmplan.commands.import_kinds import KINDS, read_files
from mmplan.errors import InputError
from mmplan.scenario import text_bytes
from mmplan.scenario.text_bytes import encoding_of, open_text

ENCODINGS: dict[str, Callable[[str], bytes]] = {
    "UTF-16 of PowerShell": lambda text: text.encode("utf-16"),
    "UTF-16, big end first": lambda text: b"\xfe\xff" + text.encode("utf-16-be"),
    "UTF-16 without mark": lambda text: text.encode("utf-16-le"),
    "UTF-32": lambda text: text.encode("utf-32"),
    "UTF-8 with mark": lambda text: text.encode("utf-8-sig"),
    "Windows line ends": lambda text: text.replace("\n", "\r\n").encode(),
    "gzip": lambda text: gzip.compress(text.encode()),
    "gzip of UTF-16": lambda text: gzip.compress(text.encode("utf-16")),
}
TEXTS = {
    "topo.txt": matrix_text(4, lambda i, j: "NV12"),
    "ds.json": json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}),
    "titan.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n[parallelism]\n',
    "run.sh": "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 \\\n"
    "  --seq-length 64 --micro-batch-size 1 --global-batch-size 8 --vocab-size 100 --bf16\n",
    "train.log": "".join(
        f" iteration {n:5d}/     100 | elapsed time per iteration (ms): 2000.0 | global batch size:    64 |\n"
        for n in range(1, 9)
    ),
    "accelerate.yaml": "distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nmixed_precision: bf16\n",
    "hosts": "node01 slots=8\nnode02 slots=8\n",
    "trace.json": json.dumps(
        {"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 5, "args": {"stream": 7}}]}
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_kind_reads_what_other_systems_write(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(TEXTS[name])
    plain = read_files([str(file)])
    for how, encode in ENCODINGS.items():
        file.write_bytes(encode(TEXTS[name]))
        reading = read_files([str(file)])
        assert (reading.kind, reading.fragment) == (plain.kind, plain.fragment), how


@given(st.text(max_size=300), st.sampled_from(("utf-16", "utf-32", "utf-8-sig")))
@settings(max_examples=50, deadline=None)
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, text: str, encoding: str) -> None:
    assume(not (encoding == "utf-16" and text.startswith("\0")))  # begins as UTF-32 does
    file = tmp_path_factory.mktemp("text") / "text"
    file.write_bytes(text.encode(encoding))
    with open_text(file) as opened:
        assert opened.read().decode("utf-8-sig") == text


def test_a_binary_file_is_not_taken_for_utf_16() -> None:
    assert encoding_of(bytes(range(256)) * 2) == "utf-8-sig"
    assert encoding_of(b"") == encoding_of(b"a") == encoding_of(b"\0") == encoding_of(bytes(512)) == "utf-8-sig"


def test_archives_are_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("x", "x")
    (tmp_path / "xz").write_bytes(lzma.compress(b"x"))
    (tmp_path / "bzip2").write_bytes(bz2.compress(b"x"))
    for name in ("zip", "xz", "bzip2"):
        for words in ([], ["nccl"], ["deepspeed"], ["kineto"], ["megatron-log"]):
            with pytest.raises(InputError, match=f"a {name} file: unpack it"):
                read_files([*words, str(tmp_path / name)])


@pytest.mark.parametrize("kind", KINDS)
def test_pipes_folders_and_files_of_nothing_or_anything_end_with_a_sentence(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "packed").write_bytes(gzip.compress(b""))
    (tmp_path / "broken").write_bytes(gzip.compress(b"text\n" * 99)[:20])
    (tmp_path / "zeros").write_bytes(bytes(100_000))
    (tmp_path / "bytes").write_bytes(bytes(range(256)) * 400)
    (tmp_path / "long").write_bytes(b"x" * 3_000_000)
    (tmp_path / "deep").write_bytes(b"[" * 200_000)
    (tmp_path / "folder").mkdir()
    for file in [*sorted(tmp_path.iterdir()), tmp_path / "nowhere", Path("/dev/zero")]:
        with pytest.raises(InputError) as caught:
            read_files([kind, str(file)])
        assert "\n" not in str(caught.value)


def test_a_log_that_unpacks_to_far_more_than_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_bytes, "UNSUSPICIOUS_BYTES", 1_000_000)
    line = b"step: 1  loss: 1.0  tps: 5\n" + b" " * 9_000 + b"\n"
    (tmp_path / "train.log").write_bytes(gzip.compress(line * 300, 9))
    with pytest.raises(InputError, match="unpacks to more than 200 times its size"):
        read_files([str(tmp_path / "train.log")])
