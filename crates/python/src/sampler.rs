//! The class `Sampler`.

use crate::column::integer;
use crate::device_call::DeviceCall;
use crate::engine::{Engine, Options};
use crate::error::{RowErrors, invalid, invalid_type};
use crate::fork::ThreadProcess;
use crate::group::Group;
use crate::head::Head;
use crate::result::{RowSample, deliver};
use crate::rows::{Columns, Requests};
use crate::tensor::{Place, Tensor};
use core::mem::take;
use flash_sampling::{Description, Exactness, Plan, RowParams, RowSample as Sample, Samples};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::sync::{Mutex, PoisonError};

/// Draws tokens for rows of hidden states, or of logits (`Sampler.for_logits`).
///
/// Noise is a pure function of (seed, position, draw, token). So a row's token does not depend on the other rows of the
/// batch, on threads or on tiles. Calls release the GIL; calls of one sampler run one after another.
///
/// Arguments of the construction:
///
/// head: the LM head. Hidden states must be on the head's device.
/// max_rows: the maximum number of rows of a call.
/// variant: "tiled", "grouped:SIZE", "online:SIZE", "sharded:SHARDS" or
///     "sharded:SHARDS:log-mass". SIZE is a positive multiple of 64. (CPU)
/// max_draws: the maximum `n` of a row.
/// max_logprobs: the maximum `logprobs` of a row; None: no row may request log-probabilities.
/// max_adjusted: the maximum number of distinct tokens with a bias, a ban or a penalty in a row of `enqueue`; None: no
///     lists of tokens. Each of these tokens takes 20 bytes of GPU memory for each of up to 256 rows. (GPU)
/// threads: the number of threads; None: all cores, in one thread pool of the process. A forked child cannot use the
///     threads of its parent. (CPU)
/// backend: for a head on the CPU: "cpu", "cpu:ISA" or "cpu:ISA:THREADS" (ISA: portable, avx2, avx512, avx512bf16, amx
///     or neon), "reference" (float64, slow), or "cuda:GPU", which copies the weight to that GPU; None: the backend of
///     the head's device.
/// canonical: draws the same tokens on every instruction set and backend; filters are errors. (CPU)
/// shadow: makes an 8-bit copy of the weight, half the memory of a bfloat16 weight. Calls of few rows read the copy
///     instead of the weight, and draw the same tokens. On some processors and GPUs, such calls take about half the
///     time (docs/shadow.md lists the processors and GPUs). Each row of such a call has neither filters nor
///     log-probabilities, or the first filter of the row is min_p or top_k. top_k is at most 1024 on the CPU, and at
///     most 128 on a GPU of compute capability 9.0, in calls of up to 64 rows. Other GPUs read the weight if a row has
///     filters. A GPU needs a weight of bfloat16 or float16, and reads the copy in calls of up to 96 rows (compute
///     capability 9.0) or 64 rows (other GPUs). On a GPU, the construction copies the weight to the host, and needs
///     host memory for the weight and the shadow.
/// group: the ranks that share the vocabulary, for example from `flash_sampling.torch.group`: an object with `rank`,
///     `world`, `time_limit` in seconds, and `all_gather(message, time_limit)`, which returns the messages of all
///     ranks. The head is this rank's shard. All ranks construct the sampler, and call it with the same rows. Every
///     rank gets the tokens that one head with the whole vocabulary would draw.
///
/// A call `sampler(input, *, seed, position, ...)` draws one token for each row. A parameter is a number for all rows,
/// or a sequence or tensor [rows]:
///
/// input: hidden states [rows, hidden], or logits [rows, vocab], in bfloat16, float16 or float32.
/// seed: the key of a row's noise, 0 to 2^64 - 1. Independent sequences need different seeds.
/// position: the token's index in its sequence, 0 to 2^56 - 1; never a batch index.
/// temperature: divides the logits; 0 takes the largest logit; None: 1.
/// top_k: keeps this many of the largest logits; None, 0 or -1: all.
/// top_p: keeps the most likely tokens until their probabilities sum to top_p; None or 1: all.
/// min_p: keeps tokens with at least min_p times the largest probability; None or 0: all.
/// mask: [rows, ceil(vocab / 32)] int32, a bitmap of allowed tokens: bit t % 32 of word t / 32.
/// out: [rows] int64, which receives the tokens and is returned.
///
/// The call waits for the tokens and returns them, [rows] int64. A torch or CuPy input gives an array of the same
/// library on the input's device. Any other input gives a numpy array, or a list if numpy is not installed. If a row
/// fails, the call raises a FlashSamplingError; its `results` has the tokens of the other rows.
#[pyclass(frozen, weakref, module = "flash_sampling")]
pub(crate) struct Sampler {
    state: Mutex<(Engine, Samples)>,
    plan: Plan,
    vocab_size: u32,
    place: Place,
    backend: &'static str,
    exactness: Exactness,
    shadow: bool,
    /// The argument's name: "hidden" or "logits".
    input: &'static str,
    process: ThreadProcess,
    /// Whether a call may have more than `max_rows` rows, and draws these rows in parts.
    has_parts: bool,
}

impl Sampler {
    fn new(engine: Engine, input: &'static str) -> Sampler {
        let place = engine.place();
        let Description { capabilities: can, shape, plan } = engine.description();
        let vocab_size = shape.vocab_size;
        let (backend, exactness, process, has_parts) = (can.backend, can.exactness, engine.process(), false);
        let shadow = can.shadow;
        let state = Mutex::new((engine, Samples::new()));
        Sampler { state, plan, vocab_size, place, backend, exactness, shadow, input, process, has_parts }
    }

    /// Borrows the input `[rows, cols]` of a call. Returns the tensor and its number of rows.
    fn borrow(&self, input: &Bound<'_, PyAny>) -> PyResult<(Tensor, usize)> {
        let tensor = Tensor::borrow(input, self.input)?;
        let rows = tensor.layout(self.input)?.rows;
        if tensor.place != self.place {
            let text = format!("{} is on {}, but the sampler is on {}", self.input, tensor.place, self.place);
            return Err(invalid(self.input, text));
        }
        Ok((tensor, rows))
    }

    /// Draws without the GIL. Returns each row's result, converted by `convert`. Adds the errors of failed rows to
    /// `errors`. A row that already has an error gets no result.
    fn draw<'a, R: Send>(
        &self,
        py: Python<'_>,
        input: &Tensor,
        rows: impl Iterator<Item = RowParams<'a>> + Send,
        errors: &mut RowErrors,
        convert: impl Fn(Option<Sample<'_>>) -> R + Send,
    ) -> PyResult<Vec<R>> {
        self.process.check()?;
        py.detach(move || {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let (engine, samples) = &mut *state;
            let rows: Vec<RowParams<'_>> = rows.collect();
            let part = if self.has_parts { self.plan.max_rows } else { rows.len() };
            let mut results = Vec::with_capacity(rows.len());
            for first in (0..rows.len().max(1)).step_by(part.max(1)) {
                let rows = &rows[first..rows.len().min(first + part)];
                engine.sample(&input.rows(first..first + rows.len()), self.input, rows, samples)?;
                results.extend(samples.iter().zip(first..).map(|(sample, row)| match sample {
                    Ok(sample) => convert(Some(sample).filter(|_| !errors.has(row))),
                    Err(error) => {
                        errors.add_error(row, &error);
                        convert(None)
                    }
                }));
            }
            Ok(results)
        })
    }
}

#[pymethods]
impl Sampler {
    #[new]
    #[pyo3(signature = (head, max_rows=256, *, variant="tiled", max_draws=1, max_logprobs=None, max_adjusted=None,
        threads=None, backend=None, canonical=false, shadow=false, group=None))]
    #[allow(clippy::too_many_arguments)]
    fn of_head(
        py: Python<'_>,
        head: &Bound<'_, PyAny>,
        max_rows: i128,
        variant: &str,
        max_draws: i128,
        max_logprobs: Option<i128>,
        max_adjusted: Option<i128>,
        threads: Option<i128>,
        backend: Option<&str>,
        canonical: bool,
        shadow: bool,
        group: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Sampler> {
        let Ok(head) = head.cast::<Head>() else {
            let found = head.get_type().name()?;
            return Err(invalid_type(format!("head must be a Head, not {found}: use Sampler(Head(weight))")));
        };
        let group = group.map(Group::of).transpose()?;
        let options =
            Options { max_rows, variant, max_draws, max_logprobs, max_adjusted, threads, backend, canonical, shadow };
        let engine = Engine::of_head(py, head.get(), &options, group)?;
        Ok(Sampler::new(engine, "hidden"))
    }

    /// Makes a sampler of existing logits [rows, vocab_size] in bfloat16, float16 or float32.
    ///
    /// The arguments have the same meaning as the arguments of the class. The backend "cuda:GPU" reads logits on that
    /// GPU in place.
    #[staticmethod]
    #[pyo3(signature = (vocab_size, max_rows=256, *, max_draws=1, max_logprobs=None, max_adjusted=None, threads=None,
        backend=None))]
    #[allow(clippy::too_many_arguments)]
    fn for_logits(
        py: Python<'_>,
        vocab_size: i128,
        max_rows: i128,
        max_draws: i128,
        max_logprobs: Option<i128>,
        max_adjusted: Option<i128>,
        threads: Option<i128>,
        backend: Option<&str>,
    ) -> PyResult<Sampler> {
        let vocab_size = integer("vocab_size", vocab_size, 1)?;
        let (variant, canonical, shadow) = ("tiled", false, false);
        let options =
            Options { max_rows, variant, max_draws, max_logprobs, max_adjusted, threads, backend, canonical, shadow };
        Ok(Sampler::new(Engine::of_logits(py, vocab_size, &options)?, "logits"))
    }

    /// Makes a sampler for `from_logits`: its calls may have any number of rows, and draw `max_rows` at a time.
    #[staticmethod]
    fn _in_parts(py: Python<'_>, vocab_size: i128, max_rows: i128, backend: &str) -> PyResult<Sampler> {
        let sampler = Sampler::for_logits(py, vocab_size, max_rows, 1, None, None, None, Some(backend))?;
        Ok(Sampler { has_parts: true, ..sampler })
    }

    /// Draws one token for each row. `help` does not show this docstring, so the docstring of the class describes the
    /// call.
    #[pyo3(signature = (input, *, seed, position, temperature=None, top_k=None, top_p=None, min_p=None, mask=None,
        out=None))]
    #[allow(clippy::too_many_arguments)]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        input: &Bound<'py, PyAny>,
        seed: &Bound<'py, PyAny>,
        position: &Bound<'py, PyAny>,
        temperature: Option<&Bound<'py, PyAny>>,
        top_k: Option<&Bound<'py, PyAny>>,
        top_p: Option<&Bound<'py, PyAny>>,
        min_p: Option<&Bound<'py, PyAny>>,
        mask: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tensor, rows) = self.borrow(input)?;
        let knobs = [temperature, top_k, top_p, min_p, mask];
        let mut columns = Columns::read(rows, self.vocab_size, seed, position, knobs)?;
        let mut errors = take(&mut columns.errors);
        let token = |sample: Option<Sample<'_>>| sample.map_or(-1, |sample| i64::from(sample.token())).to_ne_bytes();
        let tokens = self.draw(py, &tensor, columns.params(), &mut errors, token)?;
        errors.into_result(deliver(py, input, tokens.as_flattened(), "int64", out)?)
    }

    /// Draws one token for each row on a GPU, without waiting. All arguments are tensors on the sampler's GPU, except
    /// logprobs_mode and complete.
    ///
    /// input: hidden states [rows, hidden], or logits [rows, vocab], in bfloat16, float16 or float32.
    /// out: [rows] int64, which holds the tokens when the work on the current stream has finished; -1 for a row that
    ///     failed.
    /// index: [rows] int32; row r uses element or list index[r] of each parameter below except position and mask. With
    ///     index, these parameters may have any length, instead of rows or rows + 1. The call does not check that the
    ///     numbers in index are within this length. None: row r uses element or list r.
    /// seed: [rows] int64. A seed of 2^63 or more is given as the int64 with the same bits.
    /// position: [rows] int64 or int32.
    /// temperature, top_p, min_p: [rows] float32. top_k: [rows] int32, off or at most 1024.
    /// mask: [rows, ceil(vocab / 32)] int32.
    /// repetition_penalty, frequency_penalty, presence_penalty: [rows] float32. min_tokens: [rows] int32.
    /// bias_begin, bias_tokens, bias_values: [rows + 1] int64, [n] int32, [n] float32. Row r has the biases from
    ///     bias_begin[r] to bias_begin[r + 1]; each token at most once.
    /// banned_begin, banned_tokens: [rows + 1] int64 and [n] int32, the tokens that are never drawn, in the same form.
    /// stop_begin, stop_tokens: the tokens that min_tokens bans, in the same form.
    /// prompt_begin, prompt_tokens, output_begin, output_tokens: the tokens of the sequences, in the same form.
    /// bias_end, banned_end, stop_end, prompt_end, output_end: [rows] int64. With an end, begin is [rows] too; row r
    ///     has the tokens from begin[r] to end[r]. Tokens outside of the vocabulary have no effect. The call does not
    ///     check that the lists are within the tokens. Lists need Sampler(max_adjusted=...).
    /// statuses: [rows] int32, which receives a status in the low byte: 0 for a drawn token; 1 if no logit is finite; 2
    ///     if a logit is NaN; 3 if a logit is +inf; 7 if a parameter is invalid, or if the row has more adjusted tokens
    ///     than max_adjusted. The other bytes then name the parameter: 1 position, 2 temperature, 3 top_k, 4 top_p, 5
    ///     min_p, 6 repetition_penalty, 7 frequency_penalty, 8 presence_penalty, 9 bias_values, 10 max_adjusted. With a
    ///     group: 4 if a rank is late, and 5 if a rank made a different call; the other bytes have the number of this
    ///     rank.
    /// logprobs, ranks: [rows] float32 and int32, which receive the log-probability and the rank of each drawn token;
    ///     -inf and 0 for a row that failed.
    /// log_z: [rows] float64, which receives the logarithm of the sum of e^logit over the tokens of a row.
    /// top_tokens, top_logprobs: [rows, n] int32 and float32, n at most 128, which receive the most probable tokens and
    ///     their log-probabilities; -1 and -inf if a row has fewer tokens.
    /// logprob_token_ids, token_logprobs: [rows, n] int64 and float32. The call reads tokens from the first tensor, and
    ///     writes their log-probabilities to the second tensor; -inf for a token outside of the vocabulary or with
    ///     probability 0.
    /// logprobs_mode: "processed_logprobs": log-probabilities in the distribution of the draws; "raw_logprobs":
    ///     log-probabilities from the model's own logits.
    /// complete: True writes token ids of the vocabulary instead of -1: 0 to out for a row that failed, and to
    ///     top_tokens the lowest ids that are not yet in the row. n must be at most the size of the vocabulary.
    /// kept_begin, kept_tokens: [rows + 1] int64 and [capacity] int32, which receive the tokens that the filters keep:
    ///     row r has kept_tokens[kept_begin[r]:kept_begin[r + 1]], ascending. A row without filters has none. Tokens
    ///     beyond the capacity are dropped, so the lists are complete if kept_begin[rows] <= capacity.
    ///
    /// A torch.cuda.graph can capture the call, after a first call with the same parameters; the sampler and all
    /// tensors must outlive the graph. The caller orders calls of one sampler on several streams. With a group, all
    /// ranks make the same calls, and the first call of each kind waits for all ranks.
    ///
    /// Returns out.
    #[pyo3(
        signature = (input, out, *, logprobs_mode="processed_logprobs", **tensors),
        text_signature = "($self, input, out, *, seed, position, index=None, temperature=None, top_k=None, top_p=None, \
            min_p=None, mask=None, repetition_penalty=None, frequency_penalty=None, presence_penalty=None, \
            min_tokens=None, bias_begin=None, bias_end=None, bias_tokens=None, bias_values=None, banned_begin=None, \
            banned_end=None, banned_tokens=None, stop_begin=None, stop_end=None, stop_tokens=None, prompt_begin=None, \
            prompt_end=None, prompt_tokens=None, output_begin=None, output_end=None, output_tokens=None, \
            statuses=None, logprobs=None, ranks=None, log_z=None, top_tokens=None, top_logprobs=None, \
            logprob_token_ids=None, token_logprobs=None, \
            logprobs_mode='processed_logprobs', complete=False, kept_begin=None, kept_tokens=None)"
    )]
    fn enqueue<'py>(
        &self,
        py: Python<'py>,
        input: &Bound<'py, PyAny>,
        out: &Bound<'py, PyAny>,
        logprobs_mode: &str,
        tensors: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tensor, rows) = self.borrow(input)?;
        let call = DeviceCall::borrow((rows, &tensor, self.vocab_size), out, logprobs_mode, tensors)?;
        py.detach(|| {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.0.enqueue(&tensor, self.input, &call)
        })?;
        Ok(out.clone())
    }

    /// Draws with one SamplingParams for each row, and returns all results.
    ///
    /// input: hidden states [rows, hidden], or logits [rows, vocab], in bfloat16, float16 or float32.
    /// params: one SamplingParams for all rows, or one for each row.
    /// histories: one History for each row, for penalties and min_tokens; None: empty sequences, so that min_tokens
    ///     bans the stop tokens at every position.
    /// seed: the seeds of rows whose SamplingParams have no seed. A row with both seeds fails.
    /// position: the positions of the tokens in their sequences; None: the lengths of the histories; then histories
    ///     must be given.
    /// first_draw: the index of each row's first draw, 0 to 2^32 - 1: a row has the draws first_draw to first_draw + n
    ///     - 1 of its seed and position; None: 0.
    /// mask: [rows, ceil(vocab / 32)] int32, a bitmap of allowed tokens for each row, for example of a grammar.
    ///
    /// Waits for the results, and returns one RowSample for each row.
    ///
    /// Raises FlashSamplingError if a row fails; its `results` has the RowSamples of the other rows. The
    /// README lists the errors that end the whole call.
    #[pyo3(signature = (input, params, histories=None, *, seed=None, position=None, first_draw=None, mask=None))]
    #[allow(clippy::too_many_arguments)]
    fn sample<'py>(
        &self,
        py: Python<'py>,
        input: &Bound<'py, PyAny>,
        params: &Bound<'py, PyAny>,
        histories: Option<&Bound<'py, PyAny>>,
        seed: Option<&Bound<'py, PyAny>>,
        position: Option<&Bound<'py, PyAny>>,
        first_draw: Option<&Bound<'py, PyAny>>,
        mask: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tensor, rows) = self.borrow(input)?;
        let arguments = [histories, seed, position, first_draw, mask];
        let mut requests = Requests::read(rows, self.vocab_size, params, arguments)?;
        let mut errors = take(&mut requests.errors);
        let result = |sample: Option<Sample<'_>>| sample.map(RowSample::from);
        let results = self.draw(py, &tensor, requests.params(), &mut errors, result)?;
        errors.into_result(PyList::new(py, results)?.into_any())
    }

    /// The number of tokens of the vocabulary.
    #[getter]
    fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// The maximum number of rows of a call.
    #[getter]
    fn max_rows(&self) -> usize {
        self.plan.max_rows
    }

    /// The backend, with the instruction set or device if it matters.
    #[getter]
    fn backend(&self) -> &'static str {
        self.backend
    }

    /// Whether each token is the argmax of logits plus `noise`. Otherwise, only the distribution of tokens is the same.
    #[getter]
    fn is_pathwise(&self) -> bool {
        self.exactness == Exactness::Pathwise
    }

    /// Whether draws read a shadow of the weight.
    #[getter]
    fn shadow(&self) -> bool {
        self.shadow
    }

    /// The number of rows of the last call that read the whole weight in spite of the shadow. Calls of `enqueue` do not
    /// change it.
    #[getter]
    fn fallback_rows(&self, py: Python<'_>) -> usize {
        py.detach(|| self.state.lock().unwrap_or_else(PoisonError::into_inner).1.fallback_rows())
    }

    fn __repr__(&self) -> String {
        let Sampler { plan, vocab_size, place, backend, input, .. } = self;
        let max_rows = plan.max_rows;
        format!("Sampler(of {input}, vocab_size={vocab_size}, max_rows={max_rows}, on {place} by {backend})")
    }
}
