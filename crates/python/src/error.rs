//! The exceptions of the package.

use flash_sampling::cuda::CudaError;
use flash_sampling::{HeadError, Knob, ParamsError, RowError, SampleError, ShardError};
use pyo3::exceptions::{PyException, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;

pyo3::create_exception!(
    flash_sampling,
    FlashSamplingError,
    PyValueError,
    "Bad input, or a failed call.\n\n\
     row: the number of the row at fault, or None.\n\
     knob: the name of the argument or parameter at fault, or None.\n\
     errors: if rows failed, a dict from the number of each failed row to its error; otherwise None.\n\
     results: if rows failed, the results of all rows, with -1 or None for failed rows; otherwise None."
);

/// Gives the exception class its attributes, with `None` as values.
pub(crate) fn add_attributes(py: Python<'_>) -> PyResult<()> {
    let class = py.get_type::<FlashSamplingError>();
    ["row", "knob", "errors", "results"].into_iter().try_for_each(|name| class.setattr(name, py.None()))
}

/// A `FlashSamplingError` about an argument.
pub(crate) fn invalid(knob: &str, text: impl Into<String>) -> PyErr {
    at_fault(None, Some(knob), text.into())
}

/// A `TypeError`.
pub(crate) fn invalid_type(text: impl Into<String>) -> PyErr {
    PyTypeError::new_err(text.into())
}

/// Converts an error to a `FlashSamplingError` with the texts of the error and of its sources. If a source is an
/// exception such as `KeyboardInterrupt`, returns this exception instead.
pub(crate) fn failed(error: &dyn core::error::Error) -> PyErr {
    let causes = || core::iter::successors(error.source(), |error| error.source());
    match causes().find_map(|error| error.downcast_ref().and_then(interrupt)) {
        Some(interrupt) => interrupt,
        None => at_fault(None, None, text_of(error)),
    }
}

/// The texts of an error and its sources.
fn text_of(error: &dyn core::error::Error) -> String {
    let causes = core::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Returns a copy of an error that is no Python `Exception`, for example `KeyboardInterrupt`; otherwise `None`.
fn interrupt(error: &PyErr) -> Option<PyErr> {
    Python::attach(|py| (!error.is_instance_of::<PyException>(py)).then(|| error.clone_ref(py)))
}

/// Converts the error of a head, with the name of the argument at fault.
pub(crate) fn of_head(error: &HeadError) -> PyErr {
    let (knob, text) = match error {
        HeadError::Factor { what, value } => (*what, format!("{what} is {value}, but must be finite and above 0")),
        HeadError::BiasLength { .. } | HeadError::BiasValue { .. } => ("bias", error.to_string()),
        HeadError::VocabSize { .. } | HeadError::Vocab { .. } => ("vocab_size", error.to_string()),
        _ => ("weight", error.to_string()),
    };
    invalid(knob, text)
}

/// Converts the error of a call whose ranks have different parameters for a row; returns `None` for any other error.
pub(crate) fn of_ranks(error: &SampleError) -> Option<PyErr> {
    let SampleError::Backend { source, .. } = error else { return None };
    let ShardError::Params { shard, row, what } = source.downcast_ref()? else { return None };
    let text = format!("row {row}: rank {shard} was called with other parameters: {what}");
    Some(at_fault(Some(*row), Some(what), text))
}

/// Converts the error of a rank's `enqueue`.
pub(crate) fn of_enqueue(error: &SampleError) -> PyErr {
    let refused = match error {
        SampleError::Backend { source, .. } => source.downcast_ref(),
        _ => None,
    };
    match refused {
        Some(CudaError::NotEnqueued { knob }) => invalid(name(*knob), text_of(error)),
        _ => of_ranks(error).unwrap_or_else(|| failed(error)),
    }
}

/// A `FlashSamplingError` about a `SamplingParams`.
pub(crate) fn params(error: &ParamsError) -> PyErr {
    invalid(error.field, error.to_string())
}

fn at_fault(row: Option<usize>, knob: Option<&str>, text: String) -> PyErr {
    let error = FlashSamplingError::new_err(text);
    let set = Python::attach(|py| {
        error.value(py).setattr("row", row)?;
        error.value(py).setattr("knob", knob)
    });
    set.err().unwrap_or(error)
}

/// The errors of rows, each with the argument at fault. A row keeps its first error.
#[derive(Default)]
pub(crate) struct RowErrors(BTreeMap<usize, (Option<&'static str>, String)>);

impl RowErrors {
    pub(crate) fn add(&mut self, row: usize, knob: &'static str, text: String) {
        self.0.entry(row).or_insert((Some(knob), text));
    }

    /// Adds the error of a sampler, with Python's argument names.
    pub(crate) fn add_error(&mut self, row: usize, error: &RowError) {
        let text = match error {
            RowError::Unplanned { knob } => format!("{knob} needs Sampler(max_{knob}=...), which is None"),
            RowError::BeyondPlan { knob, requested, planned } => {
                format!("{} is {requested}, but the sampler has max_{knob}={planned}", name(*knob))
            }
            error => error.to_string(),
        };
        self.0.entry(row).or_insert((knob_of(error).map(name), text));
    }

    pub(crate) fn has(&self, row: usize) -> bool {
        self.0.contains_key(&row)
    }

    /// Returns the results of a call if no row failed.
    ///
    /// # Errors
    /// The error of the first failed row, with all errors and results as attributes.
    pub(crate) fn into_result<'py>(self, results: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let of_row = |(row, (knob, text)): (&usize, &(Option<&str>, String))| {
            at_fault(Some(*row), *knob, format!("row {row}: {text}"))
        };
        let Some(error) = self.0.iter().next().map(of_row) else { return Ok(results) };
        let py = results.py();
        let all = PyDict::new(py);
        for (row, one) in self.0.keys().zip(self.0.iter().map(of_row)) {
            all.set_item(row, one.into_value(py))?;
        }
        error.value(py).setattr("errors", all)?;
        error.value(py).setattr("results", results)?;
        Err(error)
    }
}

fn knob_of(error: &RowError) -> Option<Knob> {
    match *error {
        RowError::OutOfRange { knob, .. }
        | RowError::UnknownToken { knob, .. }
        | RowError::Invalid { knob, .. }
        | RowError::Unsupported { knob, .. }
        | RowError::Unplanned { knob }
        | RowError::BeyondPlan { knob, .. } => Some(knob),
        _ => None,
    }
}

/// The name of a knob in Python.
fn name(knob: Knob) -> &'static str {
    match knob {
        Knob::Draws => "n",
        Knob::Banned => "banned_token_ids",
        knob => knob.name(),
    }
}
