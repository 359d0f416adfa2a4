"""Recording in one thread never sees another thread, and is never seen by one."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from tests.recording.test_recorder import state_of, tiny
from vitflow import Explainer, record_attention
from vitflow.errors import VitflowError

THREADS, EACH = 8, 20
DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
METHODS = [
    ("rollout", {}),
    ("rollout", {"head_fusion": "min", "value_weighted": True}),
    ("attention", {"layer": 2}),
    ("attention", {"head": 1}),
    ("flow", {"layers": 2}),
    ("gae", {}),
    ("gradient_rollout", {}),
    ("gradcam", {}),
    ("input_gradient", {}),
    ("occlusion", {}),
]


def flags() -> tuple:
    return (
        torch.backends.mha.get_fastpath_enabled(),
        torch._dynamo.eval_frame._stance.stance,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


def in_threads(work: Callable[[int], object]) -> list:
    """Return the result of each thread; they start together."""
    start = threading.Barrier(THREADS)

    def run(number: int) -> object:
        start.wait(timeout=60)
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def windowed() -> nn.Module:
    """A Swin model without its windows known yet: each size that it first sees takes a pass of its own."""
    return timm.models.SwinTransformer(
        img_size=32, patch_size=2, window_size=4, embed_dim=12, depths=(2, 2), num_heads=(1, 2), num_classes=5
    ).eval()


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_eight_threads_explain_as_one_does(mode):
    model = tiny(drop_rate=0.1)
    model.train(mode == "train")
    explainer = Explainer(model, data_config=DATA)
    images = [np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8) for seed in range(2)]
    requested = [(image, *METHODS[(number + image) % 10]) for number in range(10) for image in range(2)]
    assert len(requested) == EACH

    def explain(image: int, method: str, options: dict) -> tuple:
        actual = explainer.explain(images[image], method=method, **options)
        return actual.grid.tobytes(), actual.probability, actual.target

    before, at_first = state_of(model), flags()
    alone = [explain(*one) for one in requested]

    def work(number: int) -> int:
        order = list(range(EACH))
        random.Random(number).shuffle(order)
        return sum(explain(*requested[index]) == alone[index] for index in order)

    assert in_threads(work) == [EACH] * THREADS
    assert state_of(model) == before
    assert flags() == at_first


@pytest.mark.parametrize("build", [tiny, windowed])
def test_eight_threads_record_one_model(build):
    model, other = build(), build()
    other.load_state_dict(model.state_dict())  # which has not run yet, so that its windows are still to be found
    pixels = [torch.randn(1 + number % 3, 3, 32, 32) for number in range(THREADS)]
    options = [{}, {"head_fusion": "max"}, {"gradients": True}]

    def record(model: nn.Module, number: int) -> list[Tensor]:
        entry = options[number % 3]
        with torch.set_grad_enabled(bool(entry)), record_attention(model, **entry) as trace:
            logits = model(pixels[number])
        gradients = trace.backward(logits.argmax(dim=1)).attentions if "gradients" in entry else []
        return [logits, *trace.attentions, *gradients, *(layer.tokens.keys.num_patches for layer in trace.layers)]

    before, at_first = state_of(model), flags()
    alone = [record(other, number) for number in range(THREADS)]
    for number, actual in enumerate(in_threads(lambda number: [record(model, number) for _ in range(4)])):
        for seen in actual:
            assert len(seen) == len(alone[number])
            for ours, theirs in zip(seen, alone[number], strict=True):
                assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    assert state_of(model) == before
    assert flags() == at_first


@pytest.mark.parametrize("first_to_leave", [0, 1])
@pytest.mark.parametrize("enabled", [True, False])
def test_overlapping_recordings_of_two_models_leave_the_flags_as_they_were(first_to_leave, enabled):
    models = [torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=5).eval() for _ in range(2)]
    models = [torch.compile(model, backend="eager") for model in models]
    leave = [threading.Event(), threading.Event()]
    entered, traces = threading.Barrier(3), [None, None]
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        at_first = flags()

        def record(which: int) -> None:
            with torch.no_grad(), record_attention(models[which]) as traces[which]:
                models[which](torch.randn(1, 3, 32, 32))
                entered.wait(timeout=60)
                leave[which].wait(timeout=60)

        threads = [threading.Thread(target=record, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        entered.wait(timeout=60)
        for which in (first_to_leave, 1 - first_to_leave):
            assert flags()[:2] == (enabled, "force_eager")
            leave[which].set()
            threads[which].join(timeout=60)
        assert flags() == at_first
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert all(len(trace.attentions) == 1 for trace in traces)


def elsewhere(work: Callable[[], object]) -> object:
    """Return the result of another thread, while this one waits."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(timeout=60)


@pytest.mark.parametrize("where", ["blocks.1", "blocks.1.attn", "head", ""])
def test_another_thread_may_run_the_model_in_the_middle_of_a_recording(where):
    model = tiny()
    pixels, others = torch.randn(2, 3, 32, 32), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = model(others)
        with record_attention(model, features=["blocks.1"]) as alone:
            model(pixels)
    outputs = []

    def run() -> Tensor:
        with torch.no_grad():
            return model(others)

    def interrupt(module: nn.Module, args: object, output: object) -> None:
        if not outputs:
            outputs.append(None)
            outputs.append(elsewhere(run))

    with torch.no_grad(), record_attention(model, features=["blocks.1"]) as trace:
        handle = model.get_submodule(where).register_forward_hook(interrupt)
        model(pixels)
        handle.remove()
        outputs.append(elsewhere(run))
    assert torch.equal(outputs[1], expected)
    assert torch.equal(outputs[2], expected)
    assert torch.equal(trace.pixels, pixels)
    assert torch.equal(trace.logits, alone.logits)
    assert torch.equal(trace.features["blocks.1"], alone.features["blocks.1"])
    assert len(trace.attentions) == 3
    for ours, theirs in zip(trace.attentions, alone.attentions, strict=True):
        assert torch.equal(ours, theirs)


def test_another_thread_that_fails_in_the_middle_of_a_recording_leaves_no_trace():
    model = tiny()

    def fail() -> None:
        with pytest.raises(AssertionError, match="height"):
            model(torch.randn(1, 3, 16, 16))

    handle = model.blocks[1].register_forward_hook(lambda *_: elsewhere(fail))
    with torch.no_grad(), record_attention(model) as trace:
        model(torch.randn(1, 3, 32, 32))
    handle.remove()
    assert [layer.name for layer in trace.layers] == [f"blocks.{number}.attn" for number in range(3)]


def test_a_recording_waits_for_its_turn():
    model, order = tiny(), []

    def record() -> None:
        with torch.no_grad(), record_attention(model) as trace:
            order.append("other")
            model(torch.zeros(2, 3, 32, 32))
        assert len(trace.pixels) == 2

    with ThreadPoolExecutor(1) as pool:
        with torch.no_grad(), record_attention(model) as trace:
            waiting = pool.submit(record)
            model(torch.zeros(1, 3, 32, 32))
            order.append("this")
        waiting.result(timeout=60)
    assert order == ["this", "other"]
    assert len(trace.pixels) == 1


@pytest.mark.parametrize("build", [tiny, windowed])
def test_recordings_within_a_recording_of_the_same_thread_see_the_same_pass(build):
    model, pixels = build(), torch.randn(2, 3, 32, 32)
    with torch.no_grad(), ExitStack() as stack:  # whose windows the first of them finds
        traces = [stack.enter_context(record_attention(model)) for _ in range(3)]
        model(pixels)
    with torch.no_grad(), record_attention(model) as alone:
        model(pixels)
    for trace in traces:
        assert torch.equal(trace.pixels, pixels)
        assert [layer.name for layer in trace.layers] == [layer.name for layer in alone.layers]
        assert trace.layout == alone.layout
        for ours, theirs in zip(trace.attentions, alone.attentions, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_one_recorder_cannot_be_open_twice():
    recorder = record_attention(tiny())
    with recorder, pytest.raises(VitflowError, match="open already"):
        recorder.__enter__()
    with recorder as trace, torch.no_grad():  # but one time after another
        trace.model(torch.zeros(1, 3, 32, 32))

    def record() -> None:
        with record_attention(trace.model):
            pass

    elsewhere(record)  # and its turn is over
    assert len(trace.attentions) == 3
