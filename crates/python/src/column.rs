//! One number per row: a scalar, a sequence or a tensor.

use crate::borrow::in_host_memory;
use crate::error::{RowErrors, invalid, invalid_type};
use crate::tensor::{Number, Tensor};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyFrozenSet, PyInt, PyIterator, PySet};

/// One number for all rows, or one number for each row.
pub(crate) enum Column<T> {
    Same(T),
    Each(Vec<T>),
}

impl<T: Copy> Column<T> {
    pub(crate) fn get(&self, row: usize) -> T {
        match self {
            Column::Same(value) => *value,
            Column::Each(values) => values[row],
        }
    }

    fn map<R>(self, to: impl Fn(T) -> R) -> Column<R> {
        match self {
            Column::Same(value) => Column::Same(to(value)),
            Column::Each(values) => Column::Each(values.into_iter().map(to).collect()),
        }
    }
}

/// Converts an integer argument of at least `least`.
pub(crate) fn integer<T: TryFrom<i128>>(name: &str, value: i128, least: i128) -> PyResult<T> {
    let range = match T::try_from(value) {
        Ok(converted) if value >= least => return Ok(converted),
        Err(_) if value > least => format!("below 2^{}", 8 * size_of::<T>()),
        _ => format!("at least {least}"),
    };
    Err(invalid(name, format!("{name} is {value}, but must be {range}")))
}

/// Iterates over a sequence; `None` if the object is not iterable.
///
/// # Errors
/// `TypeError` for sets and dicts, whose order has no meaning.
fn items<'py>(object: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyIterator>>> {
    let is_set = object.is_instance_of::<PySet>() || object.is_instance_of::<PyFrozenSet>();
    if is_set || object.is_instance_of::<PyDict>() {
        let found = object.get_type().name()?;
        return Err(invalid_type(format!("{name} must be a sequence or tensor, not {found}")));
    }
    Ok(object.try_iter().ok())
}

/// Reads an argument as numbers for `rows` rows.
fn numbers(object: &Bound<'_, PyAny>, name: &str, rows: usize) -> PyResult<Column<Number>> {
    // This is the common case. It comes first, because the failed look-up of a tensor's attributes is slow.
    if object.is_exact_instance_of::<PyInt>() || object.is_exact_instance_of::<PyFloat>() {
        return scalar(object, name).map(Column::Same);
    }
    let column = match Tensor::try_borrow(&in_host_memory(object, name)?, name)? {
        Some(tensor) if tensor.shape.is_empty() => Column::Same(tensor.numbers(name)?[0]),
        Some(tensor) => Column::Each(tensor.numbers(name)?),
        None => match items(object, name)? {
            Some(list) => Column::Each(list.map(|item| scalar(&item?, name)).collect::<PyResult<_>>()?),
            None => Column::Same(scalar(object, name)?),
        },
    };
    match &column {
        Column::Each(values) if values.len() != rows => {
            Err(invalid(name, format!("{name} has {} values for {rows} rows", values.len())))
        }
        _ => Ok(column),
    }
}

/// Reads a Python number or a numpy scalar.
fn scalar(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Number> {
    if let Ok(integer) = object.extract() {
        return Ok(Number::Integer(integer));
    }
    object.extract().map(Number::Float).map_err(|_| {
        let found = object.get_type().name().map(|name| name.to_string()).unwrap_or_default();
        invalid_type(format!("{name} must be a number, or a sequence or tensor of numbers, not {found}"))
    })
}

/// Reads an argument and converts each number. An invalid number of a row is an error of this row.
fn convert<T: Default>(
    object: &Bound<'_, PyAny>,
    name: &'static str,
    (rows, errors): (usize, &mut RowErrors),
    to: impl Fn(Number) -> Result<T, String>,
) -> PyResult<Column<T>> {
    Ok(match numbers(object, name, rows)? {
        Column::Same(number) => Column::Same(to(number).map_err(|fault| invalid(name, format!("{name} {fault}")))?),
        Column::Each(numbers) => {
            let values = numbers.into_iter().enumerate().map(|(row, number)| {
                to(number).unwrap_or_else(|fault| {
                    errors.add(row, name, format!("{name} {fault}"));
                    T::default()
                })
            });
            Column::Each(values.collect())
        }
    })
}

/// Reads a column of integers of at least `least` that `T` can hold; `range` describes these integers in errors.
pub(crate) fn integers<T: TryFrom<i128> + Default>(
    object: &Bound<'_, PyAny>,
    name: &'static str,
    rows: (usize, &mut RowErrors),
    (least, range): (i128, &str),
) -> PyResult<Column<T>> {
    convert(object, name, rows, |number| match number {
        Number::Integer(value) => match T::try_from(value) {
            Ok(converted) if value >= least => Ok(converted),
            _ => Err(format!("is {value}, but must be {range}")),
        },
        Number::Float(value) => Err(format!("is {value:?}, but must be an integer")),
    })
}

/// Reads a column of numbers and rounds them to float32.
pub(crate) fn rounded(object: &Bound<'_, PyAny>, name: &str, rows: usize) -> PyResult<Column<f32>> {
    Ok(numbers(object, name, rows)?.map(|number| as_f64(number) as f32))
}

/// Reads a column of float32 for a knob. A nonzero value that rounds to 0 is an error, because 0 may turn the knob off.
pub(crate) fn floats(
    object: &Bound<'_, PyAny>,
    name: &'static str,
    rows: (usize, &mut RowErrors),
) -> PyResult<Column<f32>> {
    convert(object, name, rows, |number| match (as_f64(number), as_f64(number) as f32) {
        (value, 0.0) if value != 0.0 => Err(format!("is {value:?}, which rounds to 0 as a float32")),
        (_, rounded) => Ok(rounded),
    })
}

fn as_f64(number: Number) -> f64 {
    match number {
        Number::Integer(value) => value as f64,
        Number::Float(value) => value,
    }
}

/// Reads a list of integers of any length.
pub(crate) fn list_of_integers<T: TryFrom<i128>>(
    object: &Bound<'_, PyAny>,
    name: &str,
    range: &str,
) -> PyResult<Vec<T>> {
    let convert = |number| match number {
        Number::Integer(value) => {
            T::try_from(value).map_err(|_| invalid(name, format!("{name} has {value}, but values must be {range}")))
        }
        Number::Float(value) => Err(invalid(name, format!("{name} has {value:?}, but must have integers"))),
    };
    if let Some(tensor) = Tensor::try_borrow(&in_host_memory(object, name)?, name)? {
        return tensor.numbers(name)?.into_iter().map(convert).collect();
    }
    let list = items(object, name)?.ok_or_else(|| {
        let found = object.get_type().name().map(|name| name.to_string()).unwrap_or_default();
        invalid_type(format!("{name} must be a sequence or tensor of integers, not {found}"))
    })?;
    list.map(|item| convert(scalar(&item?, name)?)).collect()
}
