//! The tokens of a sequence.

use crate::column::list_of_integers;
use flash_sampling::History as Tokens;
use pyo3::prelude::*;
use std::sync::{Arc, PoisonError, RwLock};

/// A token id.
pub(crate) const TOKENS: &str = "token ids, from 0 to 2^32 - 1";

/// A sequence so far: the prompt, and the tokens generated after it. Penalties and `min_tokens` read it.
///
/// prompt: token ids; a sequence of int, or a tensor [tokens] of integers.
/// output: the generated tokens, likewise.
#[pyclass(frozen, module = "flash_sampling")]
pub(crate) struct History {
    tokens: Arc<RwLock<Tokens>>,
}

impl History {
    /// The tokens, to read without Python.
    pub(crate) fn shared(&self) -> Arc<RwLock<Tokens>> {
        self.tokens.clone()
    }

    /// The number of tokens.
    pub(crate) fn len(&self, py: Python<'_>) -> usize {
        self.read(py, |tokens| tokens.tokens().len())
    }

    /// Reads the tokens. Waits without the GIL, which a call that holds the lock may need.
    fn read<R: Send>(&self, py: Python<'_>, read: impl FnOnce(&Tokens) -> R + Send) -> R {
        py.detach(|| read(&self.tokens.read().unwrap_or_else(PoisonError::into_inner)))
    }
}

#[pymethods]
impl History {
    #[new]
    #[pyo3(signature = (prompt=None, output=None))]
    fn new(prompt: Option<&Bound<'_, PyAny>>, output: Option<&Bound<'_, PyAny>>) -> PyResult<History> {
        let list = |object: Option<&Bound<'_, PyAny>>, name| {
            object.map_or(Ok(Vec::new()), |object| list_of_integers::<u32>(object, name, TOKENS))
        };
        let mut tokens = Tokens::new(&list(prompt, "prompt")?);
        tokens.extend(list(output, "output")?);
        Ok(History { tokens: Arc::new(RwLock::new(tokens)) })
    }

    /// Appends a generated token. Waits for calls that read the history.
    fn push(&self, py: Python<'_>, token: u32) {
        py.detach(|| self.tokens.write().unwrap_or_else(PoisonError::into_inner).push(token));
    }

    /// All tokens: the prompt, then the generated tokens.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> Vec<u32> {
        self.read(py, |tokens| tokens.tokens().to_vec())
    }

    /// The generated tokens.
    #[getter]
    fn output(&self, py: Python<'_>) -> Vec<u32> {
        self.read(py, |tokens| tokens.output().to_vec())
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.len(py)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let (prompt, output) = self.read(py, |tokens| (tokens.prompt().len(), tokens.output().len()));
        format!("History({prompt} tokens of the prompt, {output} generated)")
    }
}
