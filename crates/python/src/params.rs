//! The parameters of a request, with vLLM's names.

use crate::error;
use flash_sampling::{ParamsError, SamplingParams as Checked, SamplingParamsBuilder};
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyList, PyString, PyTuple};
use serde_json::{Map, Number, Value};
use std::sync::{Arc, Mutex, PoisonError};

/// The parameters of a request, with the names of vLLM's `SamplingParams`.
///
/// Every parameter is an optional keyword argument. A parameter of vLLM that does not affect a draw (max_tokens, stop,
/// ...) must be None or have a neutral value. Any other value and an unknown parameter are errors.
///
/// n: the number of draws (default 1).
/// temperature: divides the logits; 0 takes the largest logit (default 1.0).
/// top_p, top_k, min_p, top_n_sigma, epsilon_cutoff, typical_p, xtc_threshold, xtc_probability: the filters, which are
///     off by default (docs/filters.md).
/// order: the order of temperature and filters, "vllm", "hugging-face" or "llama-cpp" (default "vllm").
/// seed: the key of the noise, 0 to 2^64 - 1; None or -1: the argument `seed` of `Sampler.sample`.
/// presence_penalty, frequency_penalty: the penalties of tokens in the output (default 0.0).
/// repetition_penalty: the penalty of tokens in the prompt or the output (default 1.0).
/// dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers: the DRY penalty of repeated
///     sequences; dry_multiplier 0.0: off.
/// logit_bias: a dict of token ids and values that are added to their logits (default None).
/// allowed_token_ids: the only tokens that may be drawn; None: all.
/// banned_token_ids: tokens that are never drawn (default None).
/// min_tokens: the stop tokens are banned while the output has fewer than min_tokens tokens (default 0).
/// stop_token_ids: the tokens that min_tokens bans (default None).
/// logprobs: the number of most likely tokens with log-probabilities; 0: only drawn tokens; -1: all; None: off.
/// logprobs_mode: "processed_logprobs", in the distribution of the draws, or "raw_logprobs", from the model's own
///     logits.
/// logprob_token_ids: tokens whose log-probabilities are returned (default None).
/// ranks: whether the ranks of drawn tokens are returned (default False).
/// without_replacement: whether the draws of a row are different tokens (default False).
/// kept: whether the tokens that the filters keep are returned (default False).
#[pyclass(frozen, module = "flash_sampling")]
pub(crate) struct SamplingParams {
    fields: SamplingParamsBuilder,
    /// The checked parameters of the last call, and the vocabulary size of that call.
    checked: Mutex<Option<(u32, Arc<Checked>)>>,
}

impl SamplingParams {
    /// Returns the parameters, checked for a vocabulary of `vocab_size` tokens.
    ///
    /// # Errors
    /// A parameter with an invalid value, or with a token beyond the vocabulary.
    pub(crate) fn for_vocab(&self, vocab_size: u32) -> Result<Arc<Checked>, ParamsError> {
        let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        match &*checked {
            Some((size, params)) if *size == vocab_size => Ok(params.clone()),
            _ => {
                let params = self.fields.clone().build(vocab_size)?;
                Ok(checked.insert((vocab_size, Arc::new(params))).1.clone())
            }
        }
    }

    pub(crate) fn seed(&self) -> Option<u64> {
        self.fields.seed
    }

    fn value(&self) -> PyResult<Value> {
        let mut value = serde_json::to_value(&self.fields).map_err(|e| error::invalid("params", e.to_string()))?;
        if self.fields.logprobs == Some(u32::MAX) {
            value["logprobs"] = (-1).into();
        }
        Ok(value)
    }
}

#[pymethods]
impl SamplingParams {
    #[new]
    #[pyo3(signature = (**params))]
    fn new(params: Option<&Bound<'_, PyDict>>) -> PyResult<SamplingParams> {
        let value = params.map_or(Ok(Value::Object(Map::new())), |params| to_value(params))?;
        let fields: SamplingParamsBuilder = serde_json::from_value(value).map_err(|fault| {
            let faults = params.into_iter().flatten().map(|(name, value)| check(&name.extract::<String>()?, &value));
            if let Some(fault) = faults.filter_map(Result::err).next() {
                return fault;
            }
            let text = fault.to_string().replace("null", "None").replace("SamplingParams::row", "Sampler.sample");
            let text = text.replace(" or true", " or True").replace(" or false", " or False");
            // The text of an error begins with the name of the field, or has this name between backquotes.
            let field = text.split([':', ' ', '`']).next().filter(|name| !name.is_empty() && *name != "unknown");
            error::invalid(field.or_else(|| text.split('`').nth(1)).unwrap_or("params"), text.clone())
        })?;
        // The size of the vocabulary is not known yet. This check omits a list of allowed tokens, whose bitmap would
        // cover all token ids.
        let allowed_token_ids = fields.allowed_token_ids.clone().filter(Vec::is_empty);
        let values = SamplingParamsBuilder { allowed_token_ids, ..fields.clone() };
        values.build(u32::MAX - 1).map_err(|e| error::params(&e))?;
        Ok(SamplingParams { fields, checked: Mutex::new(None) })
    }

    /// The value of a parameter.
    fn __getattr__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        match self.value()?.get(name) {
            Some(value) => to_python(py, value),
            None => Err(PyAttributeError::new_err(format!("SamplingParams has no parameter {name}"))),
        }
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<SamplingParams>().is_ok_and(|other| other.get().fields == self.fields)
    }

    /// All parameters, as a dict that `SamplingParams(**dict)` reads.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.value()?)
    }

    /// The arguments from which `copy` and `pickle` make the object.
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyAny>)> {
        Ok((PyTuple::empty(py), self.to_dict(py)?))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let default = serde_json::to_value(SamplingParamsBuilder::default()).unwrap_or_default();
        let value = self.value()?;
        let set =
            value.as_object().into_iter().flatten().filter(|(name, value)| default.get(name.as_str()) != Some(value));
        let set = set.map(|(name, value)| Ok(format!("{name}={}", to_python(py, value)?.repr()?)));
        let set: Vec<String> = set.collect::<PyResult<_>>()?;
        Ok(format!("SamplingParams({})", set.join(", ")))
    }
}

/// Checks the type of a parameter's value, and the range of integers. `SamplingParams` calls this function if serde
/// refuses a value, because serde's errors have the names of Rust's types.
fn check(name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let is_list = name == "dry_sequence_breakers" || name == "logit_bias" || name.ends_with("_token_ids");
    let (least, bits) = match name {
        "seed" => (-1, 64),
        "logprobs" => (-1, 32),
        "top_k" | "dry_penalty_last_n" => (-1, 31),
        _ => (0, 32),
    };
    let range = format!("an integer from {least} to 2^{bits} - 1");
    let is_integer = |value: &Bound<'_, PyAny>| {
        let number = match value.cast::<PyString>() {
            // The keys of `logit_bias` may be texts, as in JSON.
            Ok(text) if name == "logit_bias" => text.to_string().parse().ok(),
            _ => value.extract::<i128>().ok(),
        };
        !value.is_instance_of::<PyBool>() && number.is_some_and(|number| (least..1 << bits).contains(&number))
    };
    let default = serde_json::to_value(SamplingParamsBuilder::default()).unwrap_or_default();
    let (is_valid, expected) = match default.get(name) {
        _ if value.is_none() => return Ok(()),
        None | Some(Value::String(_)) => return Ok(()),
        Some(_) if is_list => {
            for token in value.try_iter().into_iter().flatten() {
                let token = token?;
                if !is_integer(&token) {
                    let text = format!("{name} has the token {}, but must have token ids: {range}", token.repr()?);
                    return Err(error::invalid(name, text));
                }
            }
            (value.try_iter().is_ok(), if name == "logit_bias" { "a dict" } else { "a list of token ids" })
        }
        Some(Value::Bool(_)) => (value.is_instance_of::<PyBool>(), "True or False"),
        Some(Value::Number(number)) if number.is_f64() => (value.extract::<f64>().is_ok(), "a number"),
        Some(_) => (is_integer(value), &*range),
    };
    match is_valid {
        true => Ok(()),
        false => Err(error::invalid(name, format!("{name} is {}, but must be {expected}", value.repr()?))),
    }
}

/// Converts a Python value into JSON, with strings for infinities and NaN.
fn to_value(object: &Bound<'_, PyAny>) -> PyResult<Value> {
    if object.is_none() {
        Ok(Value::Null)
    } else if let Ok(flag) = object.cast::<PyBool>() {
        Ok(Value::Bool(flag.is_true()))
    } else if let Ok(text) = object.cast::<PyString>() {
        Ok(Value::String(text.to_string()))
    } else if let Ok(dict) = object.cast::<PyDict>() {
        let entries = dict.iter().map(|(key, value)| Ok((key.str()?.to_string(), to_value(&value)?)));
        entries.collect::<PyResult<_>>().map(Value::Object)
    } else if let Ok(number) = object.extract::<u64>() {
        Ok(Value::Number(number.into()))
    } else if let Ok(number) = object.extract::<i64>() {
        Ok(Value::Number(number.into()))
    } else if let Ok(number) = object.extract::<f64>() {
        Ok(match Number::from_f64(number) {
            Some(number) => Value::Number(number),
            None if number.is_nan() => Value::String("NaN".into()),
            None => Value::String(if number > 0.0 { "inf" } else { "-inf" }.into()),
        })
    } else if let Ok(items) = object.try_iter() {
        items.map(|item| to_value(&item?)).collect::<PyResult<_>>().map(Value::Array)
    } else {
        Err(PyTypeError::new_err(format!("a parameter has the unsupported type {}", object.get_type().name()?)))
    }
}

/// The number with the fewest digits that rounds to the same float32.
fn shortest(value: f64) -> f64 {
    let text = (value as f32).to_string().parse().unwrap_or(value);
    if text as f32 == value as f32 { text } else { value }
}

fn to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(flag) => PyBool::new(py, *flag).to_owned().into_any(),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(integer), _) => integer.into_pyobject(py)?.into_any(),
            (_, Some(integer)) => integer.into_pyobject(py)?.into_any(),
            _ => PyFloat::new(py, shortest(number.as_f64().unwrap_or(f64::NAN))).into_any(),
        },
        Value::String(text) => match text.as_str() {
            "inf" | "-inf" | "NaN" => PyFloat::new(py, text.parse().unwrap_or(f64::NAN)).into_any(),
            text => PyString::new(py, text).into_any(),
        },
        Value::Array(items) => {
            let items = items.iter().map(|item| to_python(py, item)).collect::<PyResult<Vec<_>>>()?;
            PyList::new(py, items)?.into_any()
        }
        Value::Object(entries) => {
            let dict = PyDict::new(py);
            for (key, value) in entries {
                // The keys of `logit_bias` are tokens.
                match key.parse::<u32>() {
                    Ok(token) => dict.set_item(token, to_python(py, value)?)?,
                    Err(_) => dict.set_item(key, to_python(py, value)?)?,
                }
            }
            dict.into_any()
        }
    })
}
