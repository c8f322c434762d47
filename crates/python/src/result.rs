//! The results of rows.

use flash_sampling::RowSample as Sample;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

/// A drawn token.
///
/// token: the global token id.
/// score: the logit plus noise, in nats; for a greedy row, the logit.
/// logit: the transformed logit, in nats.
/// raw_logit: the model's own logit, in nats, if raw log-probabilities are requested.
/// logprob: the log-probability in nats, if requested.
/// rank: the token's rank by log-probability, from 1, if requested.
#[pyclass(frozen, get_all, module = "flash_sampling")]
#[derive(Clone)]
pub(crate) struct Draw {
    token: u32,
    score: f32,
    logit: f32,
    raw_logit: Option<f32>,
    logprob: Option<f64>,
    rank: Option<u32>,
}

#[pymethods]
impl Draw {
    fn __repr__(&self) -> String {
        let Draw { token, score, logit, .. } = self;
        format!("Draw(token={token}, score={score:?}, logit={logit:?})")
    }
}

/// The tokens that the filters of a row keep.
///
/// count: the number of kept tokens.
/// log_mass: the log-sum-exp of the logits of these tokens, in nats.
#[pyclass(frozen, module = "flash_sampling")]
#[derive(Clone)]
pub(crate) struct Kept {
    #[pyo3(get)]
    count: u32,
    #[pyo3(get)]
    log_mass: f64,
    words: Vec<u32>,
}

#[pymethods]
impl Kept {
    /// The kept tokens, ascending.
    #[getter]
    fn token_ids(&self) -> Vec<u32> {
        let bits =
            self.words.iter().zip(0u32..).flat_map(|(&word, at)| (0..32).map(move |bit| (word >> bit & 1, at, bit)));
        bits.filter(|(set, ..)| *set == 1).map(|(_, at, bit)| 32 * at + bit).collect()
    }

    /// The kept tokens as a bitmap, which a call accepts as `mask`: [ceil(vocab / 32)] int32.
    #[getter]
    fn mask<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        deliver(py, py.None().bind(py), &bytes, "int32", None)
    }
}

/// The result of a row.
///
/// draws: the draws in the order of their indices; without replacement, highest score first.
/// log_z: the log-sum-exp of the logits in nats, if log-probabilities are requested.
/// top: (token, log-probability) of the most likely tokens, if requested.
/// top_logits: (token, logit) of the same tokens.
/// token_logprobs: (token, log-probability) of `logprob_token_ids`.
/// token_logits: (token, logit) of the same tokens.
/// kept: the tokens that the filters keep, if requested.
/// passes: the number of passes over the row's logits.
#[pyclass(frozen, module = "flash_sampling")]
pub(crate) struct RowSample {
    #[pyo3(get)]
    draws: Vec<Draw>,
    #[pyo3(get)]
    log_z: Option<f64>,
    #[pyo3(get)]
    top: Vec<(u32, f64)>,
    #[pyo3(get)]
    top_logits: Vec<(u32, f32)>,
    #[pyo3(get)]
    token_logprobs: Vec<(u32, f64)>,
    #[pyo3(get)]
    token_logits: Vec<(u32, f32)>,
    #[pyo3(get)]
    kept: Option<Kept>,
    #[pyo3(get)]
    passes: u32,
}

impl From<Sample<'_>> for RowSample {
    fn from(row: Sample<'_>) -> Self {
        let draws = row.draws.iter().enumerate().map(|(at, draw)| Draw {
            token: draw.token,
            score: draw.score,
            logit: draw.logit,
            raw_logit: row.raw_logits.get(at).copied(),
            logprob: row.draw_log_prob(at),
            rank: row.ranks.get(at).copied(),
        });
        RowSample {
            draws: draws.collect(),
            log_z: row.log_z,
            top: row.top_log_probs().collect(),
            top_logits: row.top.to_vec(),
            token_logprobs: row.token_log_probs().collect(),
            token_logits: row.token_logits.to_vec(),
            kept: row.kept.map(|kept| Kept { count: kept.count, log_mass: kept.log_mass, words: kept.tokens.to_vec() }),
            passes: row.passes,
        }
    }
}

#[pymethods]
impl RowSample {
    /// The first draw's token.
    #[getter]
    fn token(&self) -> u32 {
        self.draws[0].token
    }

    /// The first draw's score.
    #[getter]
    fn score(&self) -> f32 {
        self.draws[0].score
    }

    /// The first draw's logit.
    #[getter]
    fn logit(&self) -> f32 {
        self.draws[0].logit
    }

    /// The first draw's log-probability, if requested.
    #[getter]
    fn logprob(&self) -> Option<f64> {
        self.draws[0].logprob
    }

    /// The first draw's rank, if requested.
    #[getter]
    fn rank(&self) -> Option<u32> {
        self.draws[0].rank
    }

    fn __repr__(&self) -> String {
        let tokens: Vec<u32> = self.draws.iter().map(|draw| draw.token).collect();
        let logprobs: Option<Vec<f64>> = self.draws.iter().map(|draw| draw.logprob).collect();
        let logprobs = logprobs.map_or(String::new(), |logprobs| format!(", logprobs={logprobs:?}"));
        format!("RowSample(tokens={tokens:?}{logprobs})")
    }
}

/// Converts bytes to a one-dimensional array of the library of `like`, or copies the bytes to `out`.
pub(crate) fn deliver<'py>(
    py: Python<'py>,
    like: &Bound<'py, PyAny>,
    bytes: &[u8],
    dtype: &str,
    out: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let arrays = py.import("flash_sampling._arrays")?;
    arrays.call_method1("deliver", (like, PyByteArray::new(py, bytes), dtype, out))
}
