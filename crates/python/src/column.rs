//! One number per row: a scalar, a sequence or a tensor.

use crate::borrow::in_host_memory;
use crate::error::{invalid, invalid_in_row, invalid_type};
use crate::tensor::{Number, Tensor};
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyInt};

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
}

/// Reads an argument as numbers for `rows` rows.
fn numbers(object: &Bound<'_, PyAny>, name: &str, rows: usize) -> PyResult<Column<Number>> {
    // The common case first: the failed look-up of a tensor's attributes is slow.
    if object.is_exact_instance_of::<PyInt>() || object.is_exact_instance_of::<PyFloat>() {
        return scalar(object, name).map(Column::Same);
    }
    let column = match Tensor::try_borrow(&in_host_memory(object)?, name)? {
        Some(tensor) if tensor.shape.is_empty() => Column::Same(tensor.numbers(name)?[0]),
        Some(tensor) => Column::Each(tensor.numbers(name)?),
        None => match object.try_iter() {
            Ok(list) => Column::Each(list.map(|item| scalar(&item?, name)).collect::<PyResult<_>>()?),
            Err(_) => Column::Same(scalar(object, name)?),
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

/// Reads an argument and converts each number. An error names the row.
fn convert<T>(
    object: &Bound<'_, PyAny>,
    name: &str,
    rows: usize,
    to: impl Fn(Number) -> Result<T, String>,
) -> PyResult<Column<T>> {
    Ok(match numbers(object, name, rows)? {
        Column::Same(number) => Column::Same(to(number).map_err(|fault| invalid(name, format!("{name} {fault}")))?),
        Column::Each(numbers) => {
            let each = numbers.into_iter().enumerate();
            let values = each
                .map(|(row, number)| to(number).map_err(|fault| invalid_in_row(row, name, format!("{name} {fault}"))));
            Column::Each(values.collect::<PyResult<_>>()?)
        }
    })
}

/// Reads a column of integers that `T` can hold; `range` describes them in errors.
pub(crate) fn integers<T: TryFrom<i128>>(
    object: &Bound<'_, PyAny>,
    name: &str,
    rows: usize,
    range: &str,
) -> PyResult<Column<T>> {
    convert(object, name, rows, |number| match number {
        Number::Integer(value) => T::try_from(value).map_err(|_| format!("is {value}, but must be {range}")),
        Number::Float(value) => Err(format!("is {value:?}, but must be an integer")),
    })
}

/// Reads a column of numbers and rounds them to float32.
pub(crate) fn rounded(object: &Bound<'_, PyAny>, name: &str, rows: usize) -> PyResult<Column<f32>> {
    convert(object, name, rows, |number| Ok(as_f64(number) as f32))
}

/// Reads a column of float32 for a knob. A value that rounds to 0 is an error, because 0 may turn the knob off.
pub(crate) fn floats(object: &Bound<'_, PyAny>, name: &str, rows: usize) -> PyResult<Column<f32>> {
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
    match Tensor::try_borrow(&in_host_memory(object)?, name)? {
        Some(tensor) => tensor.numbers(name)?.into_iter().map(convert).collect(),
        None => object.try_iter()?.map(|item| convert(scalar(&item?, name)?)).collect(),
    }
}
