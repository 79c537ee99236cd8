"""Profiles and live seconds of modalities out of traces: what was put in comes out, and the product takes it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kineto_events import AUTOGRAD, Event, launched, mark, operator, span, write

from mmplan.commands.import_kinds import read_files
from mmplan.cost_models.attention_time import fused_attention_s
from mmplan.cost_models.calibration import Exchange, Timed
from mmplan.cost_models.gemm import gemm_s
from mmplan.errors import InputError
from mmplan.report.formats import fragment_text
from mmplan.scenario.catalogue import catalogue_device, catalogue_link
from mmplan.scenario.load import load_scenario
from mmplan.scenario.modality_profile import read_modality_profiles
from mmplan.scenario.profile import load_profile

ROOT = Path(__file__).parents[2]
H100 = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
DEVICE = catalogue_device("h100-sxm").device
GEMM = "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT"
FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t> >(Params)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<bf16>, Array<char*, 3> >(int)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BF16 = "c10::BFloat16"


class Trace:
    """Operators one after the other, each with one kernel of a given time."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.at_us, self.count = 1_000.0, 0

    def run(self, name: str, kernel: str, seconds: float, dims: list[Any], dtype: str = BF16, **args: Any) -> None:
        self.count += 1
        sizes = {"Input Dims": dims, "Input type": [dtype if dim else "Scalar" for dim in dims], **args}
        self.events.append(operator(name, self.at_us - 20, 15, **sizes))
        self.events += launched(kernel, self.at_us, seconds * 1e6, self.count)
        self.at_us += seconds * 1e6 + 100

    def product(self, rows: int, inner: int, outer: int, fraction: float, **args: Any) -> None:
        rate = DEVICE.flops_per_s("bf16")
        assert rate is not None
        seconds = gemm_s(rows, outer, inner, DEVICE, rate * fraction, 2)
        self.run("aten::mm", GEMM, seconds, [[rows, inner], [inner, outer]], **args)


def products(fraction: float) -> Trace:
    trace = Trace()
    for rows, inner, outer in ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (4096, 8192, 8192)):
        for _ in range(3):
            trace.product(rows, inner, outer, fraction)
    return trace


def profile_of(path: Path, events: list[Event], head: object = H100) -> Any:
    reading = read_files(["trace-profile", str(write(path / "t.json", events, deviceProperties=head))])
    (path / "t.profile.yaml").write_text(fragment_text(reading))
    return reading, load_profile(path / "t.profile.yaml")


def test_the_fraction_that_products_had_comes_out(tmp_path: Path) -> None:
    _, profile = profile_of(tmp_path, products(0.7).events)
    assert (profile.base, profile.device) == ("h100-sxm", "NVIDIA H100 80GB HBM3")
    assert profile.parameters["gemm_fraction"].value == pytest.approx(0.7, rel=1e-3)
    assert set(profile.parameters) == {"gemm_fraction"} and profile.link == {}


def test_calls_that_something_disturbed_do_not_count(tmp_path: Path) -> None:
    trace = products(0.7)
    for rows, inner, outer in ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (4096, 8192, 8192)):
        trace.product(rows, inner, outer, 0.2)
    _, profile = profile_of(tmp_path, trace.events)
    assert profile.parameters["gemm_fraction"].value == pytest.approx(0.7, rel=1e-3)
    assert profile.parameters["gemm_fraction"].p10 < 0.69


def test_attention_and_memory_come_out(tmp_path: Path) -> None:
    trace = products(0.6)
    peak = DEVICE.flops_per_s("bf16") or 0.0
    unit = replace(DEVICE, attention=(), attention_fraction=0.4)
    for length in (2048, 4096):
        pairs = 2.0 * length * length
        flops = 4.0 * pairs * 32 * 128
        seconds = fused_attention_s(flops, pairs, 2.0 * length, 128, True, unit, "flash2", peak)
        dims = [[2, length, 32, 128]] * 3
        scalars = ["", "", "", "", "", str(length), str(length), "0.", "True", "False"]
        trace.run("aten::_flash_attention_forward", FLASH, seconds, dims, **{"Concrete Inputs": scalars})
    for rows in (4096, 8192, 16384):
        moved = 3 * 2.0 * rows * 8192
        trace.run("aten::add", ADD, moved / (0.5 * DEVICE.memory_bytes_per_s), [[rows, 8192], [rows, 8192], []])
    _, profile = profile_of(tmp_path, trace.events)
    assert profile.parameters["attention.flash2"].value == pytest.approx(0.4, rel=1e-3)
    assert profile.parameters["memory_fraction"].value == pytest.approx(0.5, rel=1e-3)


def test_the_link_of_all_reduces_inside_a_node_comes_out(tmp_path: Path) -> None:
    trace = products(0.6)
    link = replace(catalogue_link("nvlink4"), bytes_per_s=3e11, latency_s=5e-6, fraction=1.0, nvls=False)
    for size in (2**20, 2**23, 2**26, 2**28):
        seconds = Exchange(collective=True, size=size, ranks=8, timed=Timed(seconds=1, rounds=())).predicted_s(link)
        group = {
            "Collective name": "allreduce",
            "In msg nelems": size // 2,
            "Out msg nelems": size // 2,
            "Group size": 8,
        }
        group |= {"dtype": "BFloat16", "Process Group Ranks": "[8, 9, 10, 11, 12, 13, 14, 15]"}
        trace.count += 1
        trace.events += launched(ALL_REDUCE, trace.at_us, seconds * 1e6, trace.count, stream=20, **group)
        trace.at_us += seconds * 1e6 + 100
    _, profile = profile_of(tmp_path, trace.events)
    assert profile.link["bytes_per_s"].value == pytest.approx(3e11, rel=0.02)
    assert profile.link["latency_s"].value == pytest.approx(5e-6, rel=0.05)


def test_a_scenario_takes_the_profile(tmp_path: Path) -> None:
    profile_of(tmp_path, products(0.7).events)
    text = (ROOT / "scenarios" / "tiny.yaml").read_text()
    cluster = "cluster: {profile: t.profile.yaml, device: h100-sxm,"
    (tmp_path / "s.yaml").write_text(text.replace("cluster: {device: cpu-core,", cluster))
    device = load_scenario(tmp_path / "s.yaml").cluster.pools[0].device
    assert device.name == "h100-sxm" and device.gemm_fraction == pytest.approx(0.7, rel=1e-3)


def test_products_above_the_peak_are_left_out(tmp_path: Path) -> None:
    trace = products(0.7)
    for rows in (2048, 4096, 8192):
        dims = [[rows, 4096], [4096, 4096]]
        trace.run("aten::mm", "sm90_xmma_gemm_f32f32_tf32f32", 2.0 * rows * 4096**2 / 4e14, dims, dtype="float")
    reading, profile = profile_of(tmp_path, trace.events)
    assert profile.parameters["gemm_fraction"].value == pytest.approx(0.7, rel=1e-3)
    assert any("3 products faster than the data sheet's peak" in sentence for sentence in reading.ignored)


@pytest.mark.parametrize(
    ("events", "head", "sentence"),
    [
        (products(0.7).events, [{"id": 0, "name": "NVIDIA H999"}], "the catalogue has no 'NVIDIA H999'"),
        (products(0.7).events, None, "the trace has no deviceProperties"),
        ([operator("aten::mm", 0, 10), *launched(GEMM, 50, 100, 1)], H100, "nothing in it that a profile holds"),
        ([operator("aten::mm", 0, 10)], H100, "no device work in it"),
    ],
)
def test_a_trace_that_tells_no_rates_is_refused(
    tmp_path: Path, events: list[Event], head: object, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        profile_of(tmp_path, events, head)


def test_seconds_of_modalities_are_those_of_one_call_and_replan_takes_them(tmp_path: Path) -> None:
    events: list[Event] = []
    for call, at in enumerate((1_000, 5_000)):
        for index, (module, dur) in enumerate(
            {"CLIPVisionModel_0": 300, "MultiModalProjector_0": 50, "LlamaModel_0": 700}.items()
        ):
            begin = at + 1_000 * index
            events += [span("python_function", f"nn.Module: {module}", begin - 30, 40)]
            events += launched(GEMM, begin, dur, 10 * call + index + 1)
    events += [mark("backward", 8_000, 500, tid=AUTOGRAD), *launched(GEMM, 8_100, 900, 99, tid=AUTOGRAD)]
    reading = read_files(["trace-modalities", str(write(tmp_path / "t.json", events))])
    (tmp_path / "live.yaml").write_text(fragment_text(reading))
    model = load_scenario(ROOT / "scenarios" / "tiny.yaml").model
    found = {entry.name: entry.forward_s for entry in read_modality_profiles(tmp_path / "live.yaml", model)}
    assert found == pytest.approx({"vision": 350e-6, "text": 700e-6})
    assert any("the projector's 50 us count to vision" in sentence for sentence in reading.read)


def test_a_trace_without_modules_is_refused_with_the_options_that_show_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"with_stack=True and with_modules=True"):
        read_files(["trace-modalities", str(write(tmp_path / "t.json", products(0.7).events))])
