"""Each planted fault gives its finding, each harmless near miss gives none, and the module is left as it was.

Shape legend: B batch, L length.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchproof.check import Audit

AuditOf = Callable[..., Audit]


class Fn(nn.Module):
    """A linear layer, then a function of the module and its result; the module is in eval mode."""

    def __init__(self, function: Callable[["Fn", Tensor], Tensor], **buffers: Tensor | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.function = function
        self.last: Tensor | None = None
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), *more)


def trained_norm(**options: Any) -> nn.BatchNorm1d:
    """Its stored statistics are not those of any batch here."""
    norm = nn.BatchNorm1d(3, **options)
    if norm.running_mean is not None and norm.running_var is not None:
        norm.running_mean.fill_(0.5)
        norm.running_var.fill_(2.0)
    return norm


def norm_over_row(**options: Any) -> nn.Module:
    """One channel of three numbers, so that a single row is enough for it in train mode."""
    return layers(nn.Unflatten(1, (1, 3)), nn.BatchNorm1d(1, **options))


def submodule_in_train_mode() -> nn.Module:
    module = layers(nn.Sequential(nn.Dropout(0.3))).eval()
    module[1][0].train()
    return module


def frozen_norm_in_train_mode() -> nn.Module:
    module = layers(trained_norm()).train()
    module[1].eval()
    return module


def count_up(m: Any, y: Tensor) -> Tensor:
    m.n.add_(1)
    return y


def replace_count(m: Any, y: Tensor) -> Tensor:
    m.n = m.n + 1
    return y


def running_mean(m: Any, y: Tensor) -> Tensor:
    m.n.mul_(0.9).add_(0.1 * y.mean(0))
    return y - m.n


def keep_last(m: Any, y: Tensor) -> Tensor:
    m.n.copy_(y[0])
    return y


def in_training_only(m: Any, y: Tensor) -> Tensor:
    return running_mean(m, y) if m.training else y - m.n


def lazy_cache(m: Any, y: Tensor) -> Tensor:
    if m.n is None:
        m.n = torch.arange(3.0)
    return y + m.n


def growing_cache(m: Any, y: Tensor) -> Tensor:
    m.n = torch.cat([m.n, y[0]])
    return y


def hidden_state(m: Any, y: Tensor) -> Tensor:
    out = y if m.last is None else 0.5 * (y + m.last.mean(0, keepdim=True))
    m.last = out + 1
    return out


def attribute_that_is_not_read(m: Any, y: Tensor) -> Tensor:
    m.last = y
    return y


def with_autograd(m: Any, y: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        return y.clone() * m.linear.weight.sum()


def autograd_and_detached(m: Any, y: Tensor) -> Tensor:
    return with_autograd(m, y).detach()


def unused_noise(m: Any, y: Tensor) -> Tensor:
    torch.rand(3)
    return y


def seeded_noise(m: Any, y: Tensor) -> Tensor:
    return y + torch.rand(3, generator=torch.Generator().manual_seed(0))


def reads_state_of_numpy_or_python(m: Any, y: Tensor) -> Tensor:
    return y + random.random()


def raises_in_training(m: Any, y: Tensor) -> Tensor:
    if m.training:
        raise RuntimeError("no labels")
    return y


def one_row_only(m: Any, y: Tensor) -> Tensor:
    return y.view(1, 3)


SHIFT = torch.tensor([0.0, 1.0, 2.0])

CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    # train mode in effect, or only the flag
    "flag True, dropout": (lambda: layers(nn.Dropout(0.3)), ["TP101"]),
    "flag True, linear only": (lambda: layers(), []),
    "flag True, dropout of nothing": (lambda: layers(nn.Dropout(0.0)), []),
    "flag True, frozen batch norm": (frozen_norm_in_train_mode, []),
    "flag True, batch norm": (lambda: layers(trained_norm()), ["TP101"]),
    "flag True, batch norm that takes one row": (lambda: norm_over_row(), ["TP101"]),
    "batch norm in eval mode": (lambda: layers(trained_norm()).eval(), []),
    "flag False, a submodule in train mode": (submodule_in_train_mode, ["TP101"]),
    "a branch on self.training": (lambda: Fn(lambda m, y: 2 * y if m.training else y).train(), ["TP101"]),
    "a branch on self.training, in eval mode": (lambda: Fn(lambda m, y: 2 * y if m.training else y), []),
    "a branch that changes nothing": (lambda: Fn(lambda m, y: y + 0 if m.training else y).train(), []),
    "a forward that raises in train mode": (lambda: Fn(raises_in_training).train(), ["TP101"]),
    "the same in eval mode": (lambda: Fn(raises_in_training), []),
    # random numbers
    "hard-wired dropout": (lambda: Fn(lambda m, y: F.dropout(y, 0.5)), ["TP102"]),
    "hard-wired dropout, flag True": (lambda: Fn(lambda m, y: F.dropout(y, 0.5)).train(), ["TP102"]),
    "functional dropout with the flag": (lambda: Fn(lambda m, y: F.dropout(y, 0.5, m.training)), []),
    "random numbers that reach no answer": (lambda: Fn(unused_noise), []),
    "random numbers from a seeded generator": (lambda: Fn(seeded_noise), []),
    "random numbers of Python": (lambda: Fn(reads_state_of_numpy_or_python), ["TP105"]),
    # state
    "a counter": (lambda: Fn(count_up, n=torch.tensor(0)), ["TP104"]),
    "a counter that is replaced": (lambda: Fn(replace_count, n=torch.tensor(0)), ["TP104"]),
    "a running mean": (lambda: Fn(running_mean, n=torch.zeros(3)), ["TP104"]),
    "a running mean, in training only": (lambda: Fn(in_training_only, n=torch.zeros(3)), []),
    "the last answer is kept": (lambda: Fn(keep_last, n=torch.zeros(3)), ["TP104"]),
    "a buffer that is only read": (lambda: Fn(lambda m, y: y - m.n, n=SHIFT), []),
    "a buffer with NaN that is only read": (lambda: Fn(lambda m, y: y, n=torch.tensor(float("nan"))), []),
    "an expanded buffer": (lambda: Fn(lambda m, y: y - m.n, n=torch.ones(1).expand(3)), []),
    "a cache that the first forward makes": (lambda: Fn(lazy_cache, n=None), []),
    "a cache that grows": (lambda: Fn(growing_cache, n=torch.zeros(0)), ["TP104"]),
    "a hidden state in an attribute": (lambda: Fn(hidden_state), ["TP105"]),
    "an attribute that is not read": (lambda: Fn(attribute_that_is_not_read), []),
    # autograd
    "a graph": (lambda: Fn(with_autograd), ["TP103"]),
    "a graph that is left behind": (lambda: Fn(autograd_and_detached), []),
    "enable_grad inside inference mode": (lambda: Fn(torch.enable_grad()(lambda m, y: y * 2)), []),
    # outputs
    "NaN": (lambda: Fn(lambda m, y: y / 0 * 0), ["TP601"]),
    "infinity": (lambda: Fn(lambda m, y: y.abs() / 0), ["TP601"]),
    "large": (lambda: Fn(lambda m, y: y * 1e30), []),
    "all zero": (lambda: Fn(lambda m, y: y * 0), []),
    "integers": (lambda: Fn(lambda m, y: y.argmax(-1)), []),
    # rows in a batch
    "batch norm without statistics": (lambda: norm_over_row(track_running_stats=False).eval(), ["TP701"]),
    "batch norm with statistics": (lambda: norm_over_row().eval(), []),
    "softmax over the batch": (lambda: Fn(lambda m, y: y.softmax(0)), ["TP701"]),
    "softmax over the row": (lambda: Fn(lambda m, y: y.softmax(-1)), []),
    "every row with every row": (lambda: Fn(lambda m, y: y @ y.mT), ["TP701"]),
    "centred over the batch": (lambda: Fn(lambda m, y: y - y.mean(0)), ["TP701"]),
    "one row only": (lambda: Fn(one_row_only), ["TP703"]),
    "any number of rows": (lambda: Fn(lambda m, y: y.view(-1, 3)), []),
    # other forms
    "bfloat16": (lambda: layers(nn.Linear(3, 64), nn.LayerNorm(64)).bfloat16().eval(), []),
    "float64": (lambda: layers(nn.LayerNorm(3)).double().eval(), []),
    "writes into a result of its own": (lambda: Fn(lambda m, y: y.mul_(2)), []),
}


@pytest.mark.parametrize("name", CASES)
def test_planted_faults_and_near_misses(audit_of: AuditOf, name: str) -> None:
    """The findings and no others. Batching is used only where a row's answer was shown to be its own."""
    make, codes = CASES[name]
    module = make()
    dtype = next(module.parameters()).dtype
    samples = [torch.randn(4, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(6)]
    report = audit_of(module, samples).report
    assert [f.code for f in report.findings] == codes
    assert report.batching is not bool({"TP102", "TP104", "TP105", "TP701", "TP703"} & set(codes))
    assert report.precision == "float64"


class InPlace(nn.Module):
    """Changes what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).add_(1)


def test_a_forward_that_writes_into_its_input(audit_of: AuditOf) -> None:
    """Every forward gets its own copy: repeats agree, and the samples stay as they were."""
    samples = [torch.ones(4), torch.zeros(4)]
    done = audit_of(InPlace(), samples)
    assert done.report.findings == ()
    assert [row["x"].tolist() for row in done.subject.rows] == [[1.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("name", [name for name, (_, codes) in CASES.items() if codes != ["TP105"]])
def test_the_module_is_left_as_it_was(audit_of: AuditOf, name: str) -> None:
    """Flags, buffers (themselves and their content), parameters, plain attributes, and torch's random state."""
    module = CASES[name][0]()
    parameters = copy.deepcopy(dict(module.named_parameters()))
    buffers = {n: (b, b.clone()) for n, b in module.named_buffers()}
    flags = [m.training for m in module.modules()]
    attributes = [dict(vars(m)) for m in module.modules()]
    samples = [torch.randn(4).to(next(module.parameters()).dtype) for _ in range(3)]
    state = torch.get_rng_state()
    audit_of(module, samples)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in module.modules()] == flags
    assert dict(module.named_buffers()).keys() == buffers.keys()
    for n, buffer in module.named_buffers():
        assert buffer is buffers[n][0]
        assert torch.equal(buffer.nan_to_num(-1), buffers[n][1].nan_to_num(-1))
    assert all(torch.equal(p, parameters[n]) for n, p in module.named_parameters())
    for m, before in zip(module.modules(), attributes, strict=True):
        assert vars(m).keys() == before.keys()
        assert all(vars(m)[key] is value for key, value in before.items())


def test_a_module_made_under_inference_mode_is_left_as_it_was(audit_of: AuditOf) -> None:
    """Its buffers may be written in that mode only."""
    with torch.inference_mode():
        module = Fn(count_up, n=torch.tensor(0))
    assert [f.code for f in audit_of(module).report.findings] == ["TP104"]
    assert int(module.n) == 0  # type: ignore[arg-type]


class Casts(nn.Module):
    """Computes in its own precision whatever it is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(4, 512, dtype=dtype)
        self.two = nn.Linear(512, 64, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x.to(self.dtype)).relu()).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_refuses_float64_is_probed_as_it_is(audit_of: AuditOf, dtype: torch.dtype) -> None:
    """Its own rounding raises no alarm, and the report says which precision it was."""
    report = audit_of(Casts(dtype).eval()).report
    assert (report.findings, report.batching) == ((), True)
    assert report.precision == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("num", [1, 8])
def test_equal_samples_do_not_hide_that_rows_mix(audit_of: AuditOf, num: int, value: float) -> None:
    """An example of zeros or ones, once or as a batch, is what people pass: its neighbours are changed."""
    samples = [torch.full((4,), value) for _ in range(num)]
    mixing = Fn(lambda m, y: y - y.mean(0) + 1)
    assert [f.code for f in audit_of(mixing, samples).report.findings] == ["TP701"]
    assert audit_of(Fn(lambda m, y: y - y.mean(-1, keepdim=True) + 1), samples).report.findings == ()


class Masked(nn.Module):
    """A mask has to stay one of booleans, for whatever row is made up."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(~mask, 0.0).sum(-1)


def test_a_boolean_mask_stays_one(audit_of: AuditOf) -> None:
    report = audit_of(Masked(), [{"x": torch.rand(4), "mask": torch.tensor([True, True, False, True])}]).report
    assert (report.findings, report.batching) == ((), True)


class Pool(nn.Module):
    """(B, L) ids, 0 where padded -> (B, 8), or (B, L, 8) where it doesn't pool."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.table = nn.Embedding(12, 8)
        self.how = how

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        kept = (ids != 0).unsqueeze(-1)
        if self.how == "masked mean":
            return (x * kept).sum(1) / kept.sum(1)
        if self.how == "last":
            return self.lstm(x)[0][:, -1]
        if self.how == "each token":
            return self.lstm(x)[0]
        if self.how == "each token, both ways":
            return self.lstm(x.flip(1))[0].flip(1)
        if self.how == "positions":
            return x + self.table(torch.arange(ids.shape[1]))
        if self.how == "halves":
            return x[:, ::2]
        return x.mean(1)


@pytest.mark.parametrize(
    ("how", "codes", "padding"),
    [
        ("mean", ["TP702"], False),
        ("masked mean", [], True),
        ("last", ["TP702"], False),
        ("each token", [], True),
        ("each token, both ways", ["TP702"], False),
        ("halves", [], False),  # nobody could cut its output back to a row's own size
    ],
)
@pytest.mark.parametrize("lengths", [(3, 5, 5, 9), (5, 5, 5)])
def test_padding(audit_of: AuditOf, lengths: tuple[int, ...], how: str, codes: list[str], padding: bool) -> None:
    """With samples of several sizes, and of one. Only equal sizes share a batch where padding reaches the answer."""
    samples = [torch.arange(1, n + 1) for n in lengths]
    report = audit_of(Pool(how).eval(), samples, {"ids": {0: "length"}}).report
    assert [f.code for f in report.findings] == codes
    assert (report.batching, report.padding) == (True, padding)


def test_samples_as_long_as_the_model_takes(audit_of: AuditOf) -> None:
    """Nothing longer can be tried: padding stays unproven, and there is no error and no finding."""
    samples = [torch.arange(1, 13)] * 3
    report = audit_of(Pool("positions").eval(), samples, {"ids": {0: "length"}}).report
    assert (report.findings, report.padding) == ((), False)
    assert report.signature.outputs[0].shape == ("length", 8)


class TwoDims(nn.Module):
    """Independent of padding along the first dim, not along the second."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1).mean(1)


def test_each_variable_dim_is_padded_on_its_own(audit_of: AuditOf) -> None:
    samples = [torch.ones(a, b) for a, b in ((2, 3), (4, 3), (4, 6))]
    report = audit_of(TwoDims(), samples, {"x": {0: "rows", 1: "columns"}}).report
    assert [(f.code, f.evidence["dim"]) for f in report.findings] == [("TP702", "columns")]
    assert not report.padding
