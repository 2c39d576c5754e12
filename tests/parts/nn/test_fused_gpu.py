"""The GPU's fused operations against float64, in Triton's interpreter where there is no GPU.

The interpreter runs the kernels' Python on a processor: it proves their arithmetic and their
addresses, not their speed, and not what a compiler makes of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor

from fused_models import EXAMPLES, distance, model_of, outcome
from hasten.models.adapters import add_lora
from hasten.parts.data.collate import IGNORED, packed
from hasten.parts.kernels import registry, rowwise
from hasten.parts.nn import fused_functions, fused_gpu, fused_layers, losses
from hasten.parts.nn.causal_lm import causal_lm
from hasten.parts.nn.fused_layers import fuse_layers
from hasten.parts.nn.quantised import Kind
from kernel_units import turned
from triton_marks import DEVICE, draw, far, needs_triton, on_gpu

pytestmark = on_gpu
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
needs_triton_at_all = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton isn't installed"
)
CAPABILITIES = ("80", "86", "89", "90", "100", "120")
dtypes = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
few = settings(max_examples=8)


@pytest.fixture(autouse=True)
def _on_gpu_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the GPU's operations for a processor's tensors."""
    if DEVICE == "cpu":
        monkeypatch.setattr(fused_functions, "backend", lambda x: fused_gpu)
        monkeypatch.setattr(fused_gpu, "fits", rowwise.fits)


def gradients(out: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    weights = draw(*out.shape, dtype=torch.bfloat16, seed=7)  # the same in every format
    return torch.autograd.grad((out * weights.to(out.dtype)).sum(), of)


def check(fused: Any, plain: Any, tensors: list[Tensor], tolerance: float) -> None:
    """Results and gradients of ``fused`` against ``plain`` in float64."""
    near = [t.clone().requires_grad_() for t in tensors]
    wide = [t.double().requires_grad_() for t in tensors]
    out, expected = fused(*near), plain(*wide)
    assert out.dtype == tensors[0].dtype
    assert far(out, expected) <= tolerance
    for one, other in zip(gradients(out, *near), gradients(expected, *wide), strict=True):
        assert far(one, other) <= tolerance


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@needs_triton
@dtypes
@few
@given(count=st.integers(1, 9), n=st.integers(1, 90))
def test_a_norm_beside_its_residual_is_both(dtype: torch.dtype, count: int, n: int) -> None:
    def fused(x: Tensor, weight: Tensor) -> Tensor:
        y, past = fused_functions.norm_with_residual(x, weight, 1e-5)
        return y + 2 * past

    x, weight = draw(count, n, dtype=dtype), draw(n, dtype=dtype)
    check(fused, lambda x, w: plain_norm(x, w) + 2 * x, [x, weight], 3 * ROUNDING[dtype])


@needs_triton
def test_more_rows_than_programs_share_the_weights_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_gpu, "PROGRAMS", 4)
    x, weight = draw(11, 3), draw(3)
    check(
        lambda x, w: fused_functions.norm_with_residual(x, w, 1e-5)[0],
        plain_norm,
        [x, weight],
        1e-5,
    )


@dtypes
def test_a_plain_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight = draw(2, 5, 48, dtype=dtype), draw(48, dtype=dtype)
    check(lambda x, w: fused_functions.rms_norm(x, w, 1e-5), plain_norm, [x, weight], 2**-7)


@needs_triton
@dtypes
@few
@given(count=st.integers(1, 3000))
def test_a_gate_is_silu_times_up(dtype: torch.dtype, count: int) -> None:
    tensors = [draw(count, dtype=dtype, seed=s) for s in (1, 2)]
    check(fused_functions.swiglu, lambda a, b: F.silu(a) * b, tensors, 2 * ROUNDING[dtype])


@needs_triton
@dtypes
@few
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 5, 24))),
    plain=st.integers(0, 40),
    layout=st.tuples(st.booleans(), st.booleans()),
    gap=st.integers(0, 5),
)
def test_some_columns_are_turned_and_the_others_copied(
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    plain: int,
    layout: tuple[bool, bool],
    gap: int,
) -> None:
    count, heads, m = sizes
    angle = draw(count, m)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    whole = draw(count, heads, plain + 2 * m + gap, dtype=dtype)

    def fused(x: Tensor) -> Tensor:
        return fused_functions.rotate(x[..., gap:], cos, sin, *layout)

    def slow(x: Tensor) -> Tensor:
        return turned(x[..., gap:], cos.double(), sin.double(), *layout)

    check(fused, slow, [whole], 2 * ROUNDING[dtype])


@needs_triton
def test_every_pass_is_that_of_the_processor() -> None:
    """Names, signatures and shapes without numbers: graphs and autograd know no difference."""
    for name in ("rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward", "rotate"):
        ours, theirs = getattr(fused_gpu, name), getattr(rowwise, name)
        assert str(ours._schema) == str(theirs._schema).replace("hasten::", "hasten_gpu::")
    x, weight = draw(3, 8), draw(8)
    y, inverse = fused_gpu.rms_norm(x, weight, 1e-5)
    checks = ("test_schema", "test_faketensor")
    table = draw(3, 2)
    for operation, arguments in (
        (fused_gpu.rms_norm, (x, weight, 1e-5)),
        (fused_gpu.rms_norm_backward, (y, x, weight, inverse, y)),
        (fused_gpu.rms_norm_backward, (y, x, weight, inverse, None)),
        (fused_gpu.swiglu, (x, y)),
        (fused_gpu.swiglu_backward, (x, y, x)),
        (fused_gpu.rotate, (draw(3, 2, 6), table, table, True, False, False)),
    ):
        torch.library.opcheck(operation, arguments, test_utils=checks)


@needs_triton
@pytest.mark.parametrize("operation", ["norm", "swiglu", "rotate"])
def test_no_rows_are_no_work(operation: str) -> None:
    if operation == "norm":
        assert fused_gpu.rms_norm(draw(0, 8), draw(8), 1e-5)[0].shape == (0, 8)
        nothing = draw(0, 8)
        _, dw = fused_gpu.rms_norm_backward(nothing, nothing, draw(8), draw(0), None)
        assert torch.equal(dw, torch.zeros_like(dw))
    elif operation == "swiglu":
        assert fused_gpu.swiglu(draw(0), draw(0)).shape == (0,)
    else:
        table = draw(0, 2)
        assert fused_gpu.rotate(draw(0, 2, 6), table, table, True, True, False).shape == (0, 2, 6)


def test_tables_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"can't turn \(3, 2, 6\)"):
        fused_gpu.rotate(draw(3, 2, 6), draw(4, 2), draw(4, 2), True, True, False)


@needs_triton
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
# Layers of the others are bound as the processor's are, which tests of fused layers compare.
@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_a_whole_model_trains_by_them(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound as for a GPU, every layer: loss, logits and all gradients of the plain model."""
    plain, other = (model_of(architecture).to(DEVICE) for _ in range(2))
    monkeypatch.setattr(fused_gpu, "why_not", lambda device: "")
    bound = fuse_layers(other, "cuda")
    assert bound["layer"] == 2
    assert "linear" not in bound
    batch = shortest(2)
    found = distance(outcome(other, batch), outcome(plain, batch))
    assert {n: e for n, e in found.items() if e > 2e-5} == {}


def shortest(count: int) -> dict[str, Any]:
    """A packed row of so many short examples, on the device."""
    row = packed(sorted(EXAMPLES, key=lambda r: r.length)[:count])
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in row.items()}


OPERATORS: dict[str, Any] = {
    "rms_norm": (fused_gpu, "rms_norm", "rms_norm_backward"),
    "swiglu": (fused_gpu, "swiglu", "swiglu_backward"),
    "rotate": (fused_gpu, "rotate"),
    "plain_norm": (F, "rms_norm"),
}


@needs_triton
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kernel", OPERATORS)
def test_a_model_trains_the_same_without_a_refused_kernel(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, other = (model_of("qwen3", num_hidden_layers=1).to(DEVICE) for _ in range(2))
    monkeypatch.setattr(fused_gpu, "why_not", lambda device: "")
    fuse_layers(other, "cuda")
    batch = shortest(1)
    expected = outcome(plain, batch)
    module, *names = OPERATORS[kernel]
    for name in names:
        monkeypatch.setattr(module, name, lambda *given: pytest.fail("it was refused"))
    registry.refuse(kernel, "wrong")
    try:
        found = distance(outcome(other, batch), expected)
    finally:
        registry.allow_all()
    assert {n: e for n, e in found.items() if e > 2e-5} == {}


@needs_triton
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_layer_keeps_them_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", num_hidden_layers=1).to(DEVICE)
    monkeypatch.setattr(fused_gpu, "why_not", lambda device: "")
    fuse_layers(model, "cuda")
    layer, x = model.model.layers[0], draw(2, 8, model.config.hidden_size)
    tables = model.model.rotary_emb(x, torch.arange(8, device=DEVICE)[None])
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected = layer(x, position_embeddings=tables)
    assert far(compiled(x, position_embeddings=tables), expected.double()) <= 2e-5


# Bytes of a thread that may lie outside of its registers, of which Ada has the fewest.
OUTSIDE = {"norm back 16384": 96, "float8 tile True": 120}
OUTSIDE_BEFORE_TRITON_3_7 = {**OUTSIDE, "float8 tile True": 176}


def compiled(folder: Path, *asked: str) -> dict[str, Any]:
    """What ``triton_cubins`` prints: a process of its own, as this one's Triton may interpret."""
    script = Path(__file__).with_name("triton_cubins.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, str(script), *asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What training launches, compiled for the capability that has all kernels."""
    return compiled(tmp_path_factory.mktemp("hopper"), "90", "accesses")


@pytest.mark.slow
@needs_triton_at_all
def test_loads_are_wide_though_a_launch_ignores_counts(hopper: dict[str, Any]) -> None:
    """A count of numbers that varies compiles nothing anew, and 16 bytes are moved at once."""
    accesses = hopper["accesses"]
    widest = ["ld.global.v4.b32", "st.global.v4.b32"]
    assert accesses["swiglu"] == accesses["swiglu back"] == accesses["rotate llama"] == widest
    assert accesses["norm 8192"] == sorted([*widest, "st.global.b32"]), "a root for each row, too"


@pytest.mark.slow
@needs_triton_at_all
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(hopper: dict[str, Any]) -> None:
    check_registers(hopper["outside"], "90")


@pytest.mark.long
@needs_triton_at_all
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(("80", "86", "89", "100", "120"), id="what training launches"),
        pytest.param(("all", *CAPABILITIES), id="all formats and layouts"),
    ],
)
def test_every_kernel_compiles_for_the_other_gpus(asked: tuple[str, ...], tmp_path: Path) -> None:
    check_registers(compiled(tmp_path, *asked)["outside"], *asked)


def check_registers(outside: dict[str, int], *asked: str) -> None:
    """Each kernel is there, and stays in registers."""
    numbers = [a for a in asked if a != "all"]
    usual, float8 = (19, 3) if len(numbers) == len(asked) else (104, 21)
    assert len(outside) == usual * len(numbers) + float8 * sum(int(n) >= 90 for n in numbers)
    older = tuple(map(int, metadata.version("triton").split(".")[:2])) < (3, 7)
    allowed = OUTSIDE_BEFORE_TRITON_3_7 if older else OUTSIDE
    limits = {name: allowed.get(name.rpartition(" ")[0].rpartition(" ")[0], 0) for name in outside}
    assert {n: (b, limits[n]) for n, b in outside.items() if b > limits[n]} == {}


@few
@given(rows=st.integers(1, 9), rank=st.integers(1, 5), view=st.booleans())
def test_an_adapter_is_added_to_the_layers_output(rows: int, rank: int, view: bool) -> None:
    def fused(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        y = F.linear(x, weight)
        y = y.view(rows, 1, 8) if view else y
        return fused_functions.add_adapter(y, x, down, up, 0.3).view(rows, 8)

    def plain(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return F.linear(x, weight) + 0.3 * F.linear(F.linear(x, down), up)

    tensors = [draw(rows, 6), draw(8, 6), draw(rank, 6), draw(8, rank)]
    check(fused, plain, tensors, 2e-6)


def _with_lora(**changed: Any) -> tuple[Any, Any]:
    """The same small model with a LoRA twice, the second bound as for a GPU."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config: Any = LoraConfig(
            r=2, target_modules="all-linear", init_lora_weights=False, **changed
        )
        models.append(get_peft_model(model_of("qwen2", num_hidden_layers=1), config).to(DEVICE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_gpu, "why_not", lambda device: "")
        assert fuse_layers(models[1].get_base_model(), "cuda")["adapter"] == 7
    return models[0], models[1]


def _trained(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.arange(14, device=DEVICE).view(2, 7)
    torch.manual_seed(1)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_trained_alike(one: Any, two: Any) -> None:
    plain, other = _trained(one), _trained(two)
    assert far(other[0], plain[0].double()) <= 1e-6
    assert other[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        assert far(other[1][name], gradient.double()) <= 2e-5, name


@needs_triton
def test_a_model_with_adapters_trains_the_same_and_adds_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[float] = []
    usual = fused_layers.add_adapter
    monkeypatch.setattr(
        fused_layers, "add_adapter", lambda *given: calls.append(given[-1]) or usual(*given)
    )
    assert_trained_alike(*_with_lora(lora_alpha=3))
    assert calls == [1.5] * 7


@needs_triton
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_adapters_on_a_quantised_base_are_added_in_place_too(base: Kind) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = add_lora(model_of("llama", num_hidden_layers=1), rank=2, alpha=3, base=base)
        models.append(model.to(DEVICE))
        for name, weight in models[-1].named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_gpu, "why_not", lambda device: "")
        assert fuse_layers(causal_lm(models[1]), "cuda")["adapter"]
    assert_trained_alike(*models)


@needs_triton
@pytest.mark.parametrize(
    ("changed", "after"),
    [
        ({"lora_dropout": 0.5}, lambda model: None),
        ({"use_dora": True}, lambda model: None),
        ({"lora_bias": True}, lambda model: None),
        ({}, lambda model: model.merge_adapter()),
        ({}, lambda model: model.base_model.disable_adapter_layers()),
        ({}, lambda model: model.base_model.set_adapter([])),
    ],
    ids=["dropout", "dora", "bias", "merged", "disabled", "none active"],
)
def test_what_is_no_plain_adapter_runs_as_peft_has_it(
    changed: dict[str, Any], after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_layers, "add_adapter", lambda *given: pytest.fail("it isn't plain"))
    models = _with_lora(**changed)
    found = []
    for model in models:
        after(model)
        model.train()
        torch.manual_seed(1)
        found.append(model(input_ids=torch.arange(7, device=DEVICE)[None]).logits)
    assert far(found[1], found[0].double()) <= 1e-5


@needs_triton
@dtypes
@few
@given(rows=st.integers(1, 5), n=st.integers(1, 90), left_out=st.integers(0, 4))
def test_a_row_of_logits_becomes_its_gradient(
    dtype: torch.dtype, rows: int, n: int, left_out: int
) -> None:
    logits = 3 * draw(rows, n, dtype=dtype)
    labels = (torch.arange(rows) * 31 % n).to(DEVICE)
    labels[left_out:] = IGNORED
    wide = logits.double().requires_grad_()
    of_rows = F.cross_entropy(wide, labels, reduction="none")
    (expected,) = torch.autograd.grad(of_rows.sum(), wide)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_gpu, "LOGITS_BLOCK", 16)  # several blocks, the last not full
        found = fused_gpu.cross_entropy_(logits, labels, IGNORED)
    assert far(found, of_rows.detach()) <= 2e-6
    assert far(logits, expected) <= ROUNDING[dtype]


def test_logits_that_the_kernel_does_not_take_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_gpu, "has_kernels", lambda device: True)
    monkeypatch.setattr(fused_gpu, "fits", lambda x: x.dtype == torch.bfloat16)
    logits = torch.empty(4, 8, device="meta", dtype=torch.bfloat16)
    assert losses.kernel_of_loss(logits) is fused_gpu.cross_entropy_
    assert losses.kernel_of_loss(logits.t()) is None
    assert losses.kernel_of_loss(logits.double()) is None
    registry.refuse(fused_gpu.CROSS_ENTROPY, "wrong by 3 %")
    try:
        assert losses.kernel_of_loss(logits) is None
    finally:
        registry.allow_all()


@pytest.mark.parametrize("kind", ["own class", "own forward", "hook"])
def test_an_output_that_others_may_keep_is_not_overwritten(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_layers, "add_adapter", lambda *given: pytest.fail("it was kept"))
    _, model = _with_lora()
    for module in model.modules():
        if fused_layers._is_adapted(module):
            base = module.base_layer
            if kind == "own class":
                base.__class__ = type("Kept", (torch.nn.Linear,), {})
            elif kind == "own forward":
                base.forward = base.forward
            else:
                base.register_forward_hook(lambda *given: None)
    _trained(model)


@needs_triton
def test_a_label_outside_the_vocabulary_is_no_number() -> None:
    logits = draw(3, 20)
    found = fused_gpu.cross_entropy_(logits, torch.tensor([20, -1, 4], device=DEVICE), IGNORED)
    assert found.isnan().tolist() == [True, True, False]
    assert logits.isnan().all(1).tolist() == [True, True, False]


@needs_triton
def test_the_loss_of_labelled_tokens_is_that_of_the_whole_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(losses, "kernel_of_loss", lambda logits: fused_gpu.cross_entropy_)
    hidden, weight = draw(9, 6), draw(33, 6)
    labels = torch.tensor([3, IGNORED, 32, 0, IGNORED, 7, 7, 31, 1], device=DEVICE)
    check(
        lambda x, w: losses.label_only_cross_entropy(x, w, labels, chunk=4, skip=False),
        lambda x, w: F.cross_entropy(x @ w.t(), labels, reduction="sum", ignore_index=IGNORED),
        [hidden, weight],
        1e-5,
    )
