//! The tokens of a sequence.

use crate::column::{integer, list_of_integers};
use flash_sampling::History as Tokens;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The range of token ids, as text for errors.
pub(crate) const TOKENS: &str = "token ids, from 0 to 2^32 - 1";

/// The tokens of a sequence, which penalties and `min_tokens` need: the prompt, and the tokens generated after it.
///
/// prompt: token ids; a sequence of int, or a tensor [tokens] of integers.
/// output: the generated tokens, in the same form.
#[pyclass(frozen, module = "flash_sampling")]
pub(crate) struct History {
    tokens: Mutex<Arc<Tokens>>,
}

impl History {
    /// The current tokens. Later calls of `push` do not change the snapshot.
    pub(crate) fn snapshot(&self) -> Arc<Tokens> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Tokens>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
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
        Ok(History { tokens: Mutex::new(Arc::new(tokens)) })
    }

    /// Appends a generated token. A call that reads the history at the same time does not see this token.
    fn push(&self, token: i128) -> PyResult<()> {
        let token = integer("token", token, 0)?;
        Arc::make_mut(&mut *self.lock()).push(token);
        Ok(())
    }

    /// All tokens: the prompt, then the generated tokens.
    #[getter]
    fn tokens(&self) -> Vec<u32> {
        self.lock().tokens().to_vec()
    }

    /// The generated tokens.
    #[getter]
    fn output(&self) -> Vec<u32> {
        self.lock().output().to_vec()
    }

    fn __len__(&self) -> usize {
        self.lock().tokens().len()
    }

    fn __repr__(&self) -> String {
        let tokens = self.lock();
        format!("History({} tokens of the prompt, {} generated)", tokens.prompt().len(), tokens.output().len())
    }
}
