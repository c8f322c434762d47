from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypeAlias, final

class _DLPack(Protocol):
    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class _Array(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

# The ranks that share a vocabulary. time_limit is in seconds; all_gather returns the messages of all ranks.
class _Group(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def time_limit(self) -> float: ...
    def all_gather(self, message: bytes, time_limit: float, /) -> list[bytes]: ...

# A torch, JAX or CuPy tensor, or a numpy array.
_Tensor: TypeAlias = _DLPack | _Array
# One number for all rows, or one number for each row.
_Ints: TypeAlias = int | Iterable[int] | _Tensor
_Floats: TypeAlias = float | Iterable[float] | _Tensor

__all__ = [
    "Draw",
    "FlashSamplingError",
    "Head",
    "History",
    "Kept",
    "RowSample",
    "Sampler",
    "SamplingParams",
    "__version__",
    "cuda_compiler",
    "noise",
]
__version__: str

class FlashSamplingError(ValueError):
    """Bad input, or a failed call."""

    row: int | None
    knob: str | None
    errors: dict[int, FlashSamplingError] | None
    results: Any

@final
class Head:
    """An LM head: `logits = scale * soft_cap(hidden @ weight.T + bias)`. The head borrows the weight [vocab, hidden].

    The weight is bfloat16, float16 or float32. With weight_scale, the weight is float8_e4m3fn or int8. weight_scale is
    bfloat16, float16 or float32; a tensor on a GPU is contiguous float32. weight_scale is a number or [] for the weight,
    [vocab] or [vocab, 1] for its rows, [ceil(vocab / 128), ceil(hidden / 128)] for blocks of 128 x 128, or [vocab, n]
    for groups of hidden / n columns.

    Raises FlashSamplingError for a wrong shape or value, for a missing weight_scale, and for a weight_scale beside a
    weight of floats. Raises TypeError for an element type that is not supported.
    """

    def __new__(
        cls,
        weight: _Tensor,
        bias: _Floats | None = None,
        soft_cap: float | None = None,
        scale: float = 1.0,
        vocab_size: int | None = None,
        first_token: int = 0,
        weight_scale: float | _Tensor | None = None,
    ) -> Head: ...
    @staticmethod
    def from_gguf(path: str | PathLike[str], tensor: str | None = None) -> Head:
        """Maps a GGUF file, and makes its head. The weight [vocab, hidden] may have any GGUF type of docs/weights.md.

        tensor: the name of the weight. The default is "output.weight", or "token_embd.weight" if the file has no
        "output.weight". The head has the vocabulary size (at most the rows of the weight), the soft cap and the scale
        of the file. With the default weight, the head also has the bias of the file.

        Raises OSError if the file cannot be read. Raises FlashSamplingError if the file is not a GGUF file, has no such
        tensor, or has the tensor in a type that is not supported.
        """

    @property
    def vocab_size(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def device(self) -> str: ...

@final
class History:
    """The tokens of a sequence: the prompt, and the tokens generated after it."""

    def __new__(
        cls, prompt: Iterable[int] | _Tensor | None = None, output: Iterable[int] | _Tensor | None = None
    ) -> History: ...
    def push(self, token: int) -> None: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def output(self) -> list[int]: ...
    def __len__(self) -> int: ...

@final
class SamplingParams:
    """The parameters of a request, with the names of vLLM's `SamplingParams`.

    A parameter of vLLM that does not affect a draw (`max_tokens`, `stop`, ...) must be None or have a neutral value.
    """

    def __new__(
        cls,
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: dict[int, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        banned_token_ids: Sequence[int] | None = None,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] | None = None,
        logprobs: int | None = None,
        logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs",
        logprob_token_ids: Sequence[int] | None = None,
        ranks: bool = False,
        top_n_sigma: float = 0.0,
        epsilon_cutoff: float = 0.0,
        typical_p: float = 1.0,
        xtc_threshold: float = 0.1,
        xtc_probability: float = 0.0,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_penalty_last_n: int = -1,
        dry_sequence_breakers: Sequence[int] | None = None,
        order: Literal["vllm", "hugging-face", "llama-cpp"] = "vllm",
        without_replacement: bool = False,
        kept: bool = False,
        **neutral: Any,
    ) -> SamplingParams: ...
    def __getattr__(self, name: str) -> Any: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...
    def to_dict(self) -> dict[str, Any]: ...

@final
class Draw:
    """A drawn token."""

    @property
    def token(self) -> int: ...
    @property
    def score(self) -> float: ...
    @property
    def logit(self) -> float: ...
    @property
    def raw_logit(self) -> float | None: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def rank(self) -> int | None: ...

@final
class Kept:
    """The tokens that the filters of a row keep."""

    @property
    def count(self) -> int: ...
    @property
    def log_mass(self) -> float: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def mask(self) -> Any: ...

@final
class RowSample:
    """The result of a row."""

    @property
    def draws(self) -> list[Draw]: ...
    @property
    def log_z(self) -> float | None: ...
    @property
    def top(self) -> list[tuple[int, float]]: ...
    @property
    def top_logits(self) -> list[tuple[int, float]]: ...
    @property
    def token_logprobs(self) -> list[tuple[int, float]]: ...
    @property
    def token_logits(self) -> list[tuple[int, float]]: ...
    @property
    def kept(self) -> Kept | None: ...
    @property
    def passes(self) -> int: ...
    @property
    def token(self) -> int: ...
    @property
    def score(self) -> float: ...
    @property
    def logit(self) -> float: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def rank(self) -> int | None: ...

@final
class Sampler:
    """Draws tokens for rows of hidden states [rows, hidden], or of logits [rows, vocab] (`Sampler.for_logits`)."""

    def __new__(
        cls,
        head: Head,
        max_rows: int = 256,
        *,
        variant: str = "tiled",
        max_draws: int = 1,
        max_logprobs: int | None = None,
        max_adjusted: int | None = None,
        threads: int | None = None,
        backend: str | None = None,
        canonical: bool = False,
        shadow: bool = False,
        group: _Group | None = None,
    ) -> Sampler: ...
    @staticmethod
    def for_logits(
        vocab_size: int,
        max_rows: int = 256,
        *,
        max_draws: int = 1,
        max_logprobs: int | None = None,
        max_adjusted: int | None = None,
        threads: int | None = None,
        backend: str | None = None,
    ) -> Sampler:
        """Makes a sampler of existing logits [rows, vocab_size]. The backend "cuda:GPU" reads logits on that GPU."""

    @staticmethod
    def _in_parts(vocab_size: int, max_rows: int, backend: str) -> Sampler: ...
    def __call__(
        self,
        input: _Tensor,
        *,
        seed: _Ints,
        position: _Ints,
        temperature: _Floats | None = None,
        top_k: _Ints | None = None,
        top_p: _Floats | None = None,
        min_p: _Floats | None = None,
        mask: _Tensor | None = None,
        out: Any = None,
    ) -> Any:
        """Draws one token for each row: [rows] int64. The docstring of the class describes the arguments."""

    def enqueue(
        self,
        input: _Tensor,
        out: _Tensor,
        *,
        seed: _Tensor,
        position: _Tensor,
        index: _Tensor | None = None,
        temperature: _Tensor | None = None,
        top_k: _Tensor | None = None,
        top_p: _Tensor | None = None,
        min_p: _Tensor | None = None,
        mask: _Tensor | None = None,
        repetition_penalty: _Tensor | None = None,
        frequency_penalty: _Tensor | None = None,
        presence_penalty: _Tensor | None = None,
        min_tokens: _Tensor | None = None,
        bias_begin: _Tensor | None = None,
        bias_end: _Tensor | None = None,
        bias_tokens: _Tensor | None = None,
        bias_values: _Tensor | None = None,
        banned_begin: _Tensor | None = None,
        banned_end: _Tensor | None = None,
        banned_tokens: _Tensor | None = None,
        stop_begin: _Tensor | None = None,
        stop_end: _Tensor | None = None,
        stop_tokens: _Tensor | None = None,
        prompt_begin: _Tensor | None = None,
        prompt_end: _Tensor | None = None,
        prompt_tokens: _Tensor | None = None,
        output_begin: _Tensor | None = None,
        output_end: _Tensor | None = None,
        output_tokens: _Tensor | None = None,
        statuses: _Tensor | None = None,
        logprobs: _Tensor | None = None,
        ranks: _Tensor | None = None,
        log_z: _Tensor | None = None,
        top_tokens: _Tensor | None = None,
        top_logprobs: _Tensor | None = None,
        logprob_token_ids: _Tensor | None = None,
        token_logprobs: _Tensor | None = None,
        logprobs_mode: str = "processed_logprobs",
        complete: bool = False,
        kept_begin: _Tensor | None = None,
        kept_tokens: _Tensor | None = None,
    ) -> Any:
        """Draws one token for each row on a GPU, without waiting, and writes the tokens to out: [rows] int64."""

    def sample(
        self,
        input: _Tensor,
        params: SamplingParams | Sequence[SamplingParams],
        histories: Sequence[History] | None = None,
        *,
        seed: _Ints | None = None,
        position: _Ints | None = None,
        first_draw: _Ints | None = None,
        mask: _Tensor | None = None,
    ) -> list[RowSample]:
        """Draws with one SamplingParams for each row, and returns all results: one RowSample for each row.

        seed: the seeds of rows whose SamplingParams have no seed. A row with both seeds fails.
        position: None means the lengths of the histories; then histories must be given.

        Raises FlashSamplingError if a row fails; its `results` has the RowSamples of the other rows. The README
        lists the errors that end the whole call.
        """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def is_pathwise(self) -> bool: ...
    @property
    def shadow(self) -> bool:
        """Whether draws read a shadow of the weight."""

    @property
    def fallback_rows(self) -> int:
        """The number of rows of the last call that read the whole weight in spite of the shadow; not of `enqueue`."""

def noise(seed: int, position: int, draw: int, tokens: Iterable[int] | _Tensor) -> Any:
    """The standard Gumbel noise of tokens: [tokens] float32."""

def cuda_compiler() -> tuple[int, int] | None:
    """The version of NVIDIA's run-time compiler, (major, minor); None if its library cannot be loaded."""
