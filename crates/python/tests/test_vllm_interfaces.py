"""The plugin of vLLM leaves models, options and interfaces that it does not know to vLLM, with a warning."""

import importlib.metadata
import sys

import pytest
from conftest import library

torch = library("torch")
import stub_vllm as stub  # noqa: E402
from engines import Enqueued, warnings  # noqa: E402
from vllm_server import ROWS, Model, Server, engine, server  # noqa: E402, F401

from flash_sampling import vllm as plugin  # noqa: E402


def change_sampler(server):
    class GPUWatermarkSampler(stub.Sampler):
        pass

    server.sampler.__class__ = GPUWatermarkSampler


RUNNERS_OF_THE_ENGINE = {
    "the sampler is a GPUWatermarkSampler": change_sampler,
    "Sampler has unknown or missing attributes: nonce": lambda server: setattr(server.sampler, "nonce", 1),
    "LogitBiasState has unknown or missing attributes: spare": lambda server: setattr(
        server.sampler.logits_processors[0], "spare", 1
    ),
    "SamplingStates has unknown or missing attributes: typical_p": lambda server: setattr(
        server.sampler.sampling_states, "typical_p", 1
    ),
    "the device is xpu": lambda server: setattr(server.runner, "device", torch.device("xpu")),
    "the batch is sharded": lambda server: setattr(server.runner, "batch_sharder", 1),
    "speculative decoding is on": lambda server: setattr(server.runner, "rejection_sampler", 1),
    "LoRA is enabled": lambda server: setattr(server.runner, "lora_config", 1),
    "the logits processors are": lambda server: server.sampler.logits_processors.append(1),
    "the sampling mask is returned": lambda server: setattr(server.sampler, "return_sampling_mask", True),
    "NaNs are counted": lambda server: setattr(server.sampler, "compute_nans", True),
    "the noise is in float64": lambda server: setattr(server.sampler, "use_fp64_gumbel", True),
    "tokens are replayed": lambda server: setattr(server.sampler, "trace_replay_state", 1),
    "has no attribute 'lora_config'": lambda server: delattr(server.runner, "lora_config"),
    "has no attribute 'enabled'": lambda server: delattr(server.sampler.thinking_budget_state, "enabled"),
    "PenaltiesState has unknown or missing attributes: use_penalty": lambda server: delattr(
        server.sampler.penalties_state, "use_penalty"
    ),
    "BadWordsState has unknown or missing attributes: patterns": lambda server: setattr(
        server.sampler.logits_processors[2], "patterns", 1
    ),
    "the head is sharded over 2 ranks": lambda server: setattr(server.runner.model.lm_head, "tp_size", 2),
    "the head's quantization method is int": lambda server: setattr(server.runner.model.lm_head, "quant_method", 1),
    "the head computes in torch.bfloat16": lambda server: setattr(
        server.runner.model.logits_processor, "head_dtype", torch.bfloat16
    ),
    "the model's output is logits": lambda server: setattr(
        server.runner.model.logits_processor, "logits_as_input", True
    ),
}


@pytest.mark.parametrize("reason, change", RUNNERS_OF_THE_ENGINE.items(), ids=RUNNERS_OF_THE_ENGINE)
def test_vllm_draws_what_is_not_supported(server, caplog, reason, change):
    change(server)
    assert server.step() == [stub.ENGINE_TOKEN] * ROWS and server.step() == [stub.ENGINE_TOKEN] * ROWS
    [warning] = warnings(caplog)
    assert warning.startswith("vLLM draws its own tokens: ") and reason in warning


def test_vllm_draws_if_there_is_no_sampler(server, monkeypatch, caplog):
    """For example, because NVRTC is not installed."""
    monkeypatch.setattr(Enqueued, "enqueue", None)
    assert server.step() == server.step() == [stub.ENGINE_TOKEN] * ROWS
    assert warnings(caplog) == ["vLLM draws its own tokens: 'NoneType' object is not callable"]


class Masked(Model):
    def compute_logits(self, hidden_states):
        logits = super().compute_logits(hidden_states)
        logits[:, 7] = torch.finfo(logits.dtype).min
        return logits


class Scaled(Model):
    def compute_logits(self, hidden_states):
        return super().compute_logits(hidden_states / 2)


class Biased(Model):
    def compute_logits(self, hidden_states):
        bias = torch.ones(len(self.lm_head.weight))
        return self.logits_processor(self.lm_head, hidden_states, embedding_bias=bias)


class Twice(Model):
    def compute_logits(self, hidden_states):
        return super().compute_logits(hidden_states) + super().compute_logits(hidden_states)


@pytest.mark.parametrize(
    "model, reason",
    [
        (Masked, "the logits of Masked are not those of its head"),
        (Scaled, "the logits of Scaled are not those of its head"),
        (Biased, "the head has a bias"),
        (Twice, "the logits of Twice come from 2 logits processors"),
    ],
)
def test_vllm_draws_from_the_logits_of_a_model_that_changes_them(caplog, model, reason):
    plugin.register()
    server = Server(model=model)
    assert server.step() == [stub.ENGINE_TOKEN] * ROWS
    assert warnings(caplog) == [f"vLLM draws its own tokens: {reason}"]


def test_the_environment_variable_turns_the_plugin_off(monkeypatch):
    monkeypatch.setenv("FLASH_SAMPLING_VLLM", "0")
    plugin.register()
    assert Server().step() == [stub.ENGINE_TOKEN] * ROWS
    monkeypatch.setenv("FLASH_SAMPLING_VLLM", "1")
    plugin.register()
    assert Server().step() == Server().direct()


def test_a_second_registration_changes_nothing():
    plugin.register()
    once = stub.GPUModelRunner.sample
    plugin.register()
    assert stub.GPUModelRunner.sample is once and stub.GPUModelRunner.sample.__wrapped__.__code__ is not once.__code__


def sample_with_a_new_parameter(self, hidden_states, input_batch, grammar_output, nonce):
    pass


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            lambda patch: patch.setattr(stub.GPUModelRunner, "sample", sample_with_a_new_parameter),
            "GPUModelRunner.sample of vllm.v1.worker.gpu.model_runner has the parameters "
            "self hidden_states input_batch grammar_output nonce, instead of",
        ),
        (
            lambda patch: patch.delitem(stub.InputBatch.__dataclass_fields__, "has_prefill"),
            "InputBatch has unknown or missing attributes: has_prefill",
        ),
        (
            lambda patch: patch.delattr(sys.modules["vllm.v1.worker.gpu.sample.sampler"], "Sampler"),
            "has no attribute 'Sampler'",
        ),
        (
            lambda patch: patch.setitem(sys.modules, "vllm.v1.worker.gpu.model_runner", None),
            "vllm.v1.worker.gpu.model_runner",
        ),
    ],
)
def test_vllm_with_other_interfaces_does_not_change(monkeypatch, caplog, change, reason):
    change(monkeypatch)
    before = stub.GPUModelRunner.sample
    plugin.register()
    [warning] = warnings(caplog)
    assert warning.startswith("vLLM draws its own tokens: ") and reason in warning
    assert stub.GPUModelRunner.sample is before


def test_the_wheel_has_the_entry_point():
    [entry] = importlib.metadata.entry_points(group="vllm.general_plugins", name="flash_sampling")
    assert entry.load() is plugin.register


def test_an_installed_vllm_has_the_known_interfaces(monkeypatch):
    monkeypatch.undo()
    library("vllm")
    plugin._check_interfaces()
