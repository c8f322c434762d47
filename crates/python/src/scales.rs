//! The scales of a weight of 8-bit elements.

use crate::error::{invalid, invalid_type};
use crate::head::Floats;
use crate::tensor::{Layout, Place, Tensor};
use flash_sampling_models::quantization::{SCALE_BLOCK, scale_block};
use pyo3::prelude::*;
use pyo3::types::PyFloat;

/// The name of the argument of `Head`.
const NAME: &str = "weight_scale";

/// One factor for each block of the weight, row by row.
pub(crate) struct WeightScales {
    pub(crate) values: Floats,
    /// Rows and columns of a block.
    pub(crate) block: [usize; 2],
}

impl WeightScales {
    /// Reads the scales of a weight. Only weights of 8-bit elements have scales. A weight on a GPU may have scales in host
    /// memory, or contiguous float32 on the same GPU.
    ///
    /// # Errors
    /// Missing scales, scales of a weight of floats, a wrong shape, type or device, and scales that are not finite. The
    /// values of scales on a GPU are not checked.
    pub(crate) fn read(
        scale: Option<&Bound<'_, PyAny>>,
        weight: &Tensor,
        layout: &Layout,
    ) -> PyResult<Option<WeightScales>> {
        let found = weight.type_name();
        let scale = match (scale, layout.dtype.is_scaled()) {
            (None, false) => return Ok(None),
            (Some(scale), true) => scale,
            (None, true) => return Err(invalid(NAME, format!("weight has elements of {found}, which need {NAME}"))),
            (Some(_), false) => {
                let text =
                    format!("{NAME} needs a weight of float8_e4m3fn or int8, but weight has elements of {found}");
                return Err(invalid(NAME, text));
            }
        };
        let tensor = Tensor::try_borrow(scale, NAME)?;
        let block = block_of(tensor.as_ref().map_or(&[][..], |tensor| &tensor.shape), [layout.rows, layout.cols])?;
        let values = match tensor {
            None => Floats::Host(vec![number(scale)?]),
            Some(tensor) if tensor.place == Place::Host => Floats::Host(tensor.floats(NAME)?),
            Some(tensor) if tensor.place == weight.place && tensor.is_floats() => Floats::Device(tensor),
            Some(_) => {
                let expected = match weight.place {
                    Place::Host => "a number or a tensor on the CPU".to_owned(),
                    place => format!("a number, a tensor on the CPU, or contiguous float32 on {place}"),
                };
                return Err(invalid(NAME, format!("{NAME} must be {expected}")));
            }
        };
        if let Floats::Host(values) = &values
            && let Some(at) = values.iter().position(|value| !value.is_finite())
        {
            return Err(invalid(NAME, format!("{NAME} has {} at index {at}, but must be finite", values[at])));
        }
        Ok(Some(WeightScales { values, block }))
    }
}

/// The value of a number, or of an array without dimensions.
fn number(scale: &Bound<'_, PyAny>) -> PyResult<f32> {
    if !scale.is_instance_of::<PyFloat>() && scale.hasattr("__array_interface__")? {
        let tensor = Tensor::try_borrow(&scale.call_method1("reshape", (1,))?, NAME)?;
        return Ok(tensor.expect("the array has one dimension").floats(NAME)?[0]);
    }
    scale.extract().map_err(|_| {
        let found = scale.get_type().name().map(|name| name.to_string()).unwrap_or_default();
        invalid_type(format!("{NAME} must be a number or a tensor, not {found}"))
    })
}

/// Rows and columns of the block of a scale. Scales `[rows, n]` have blocks of one row and `cols / n` columns.
fn block_of(shape: &[usize], [rows, cols]: [usize; 2]) -> PyResult<[usize; 2]> {
    scale_block(shape, [rows, cols], SCALE_BLOCK).or_else(|expected| match *shape {
        [n, groups] if n == rows && groups > 0 && cols.is_multiple_of(groups) => Ok([1, cols / groups]),
        _ => {
            let expected = format!("{expected}, or [{rows}, n] for groups of {cols} / n columns");
            Err(invalid(NAME, format!("{NAME} has shape {shape:?}, but a weight [{rows}, {cols}] needs {expected}")))
        }
    })
}
