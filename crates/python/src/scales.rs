//! The scales of a weight of 8-bit elements.

use crate::error::{invalid, invalid_type};
use crate::head::Floats;
use crate::tensor::{Layout, Place, Tensor};
use flash_sampling_models::quantization::{SCALE_BLOCK, scale_block};
use pyo3::prelude::*;
use pyo3::types::PyFloat;

/// The argument of `Head` that takes the scales.
const NAME: &str = "weight_scale";

/// The scales of a weight: one factor for each block, in row-major order of the blocks.
pub(crate) struct WeightScales {
    pub(crate) values: Floats,
    /// Rows and columns of a block.
    pub(crate) block: [usize; 2],
}

impl WeightScales {
    /// Reads the scales of a weight. Only weights of 8-bit elements have scales. The scales of a weight on a GPU are in
    /// host memory, or contiguous float32 on the same GPU.
    ///
    /// # Errors
    /// A weight of 8-bit elements has no scales, or a weight of floats has scales. The scales have a wrong shape, type
    /// or device, or are not finite. This function does not check the values of scales on a GPU.
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

/// Returns the value of a Python number, or of an array without dimensions.
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

/// Returns the rows and columns of the block that shares a scale. With scales `[rows, n]`, a block has one row and
/// `cols / n` columns.
fn block_of(shape: &[usize], [rows, cols]: [usize; 2]) -> PyResult<[usize; 2]> {
    scale_block(shape, [rows, cols], SCALE_BLOCK).or_else(|expected| match *shape {
        [n, groups] if n == rows && groups > 0 && cols.is_multiple_of(groups) => Ok([1, cols / groups]),
        _ => {
            let expected = format!("{expected}, or [{rows}, n] for groups of {cols} / n columns");
            Err(invalid(NAME, format!("{NAME} has shape {shape:?}, but a weight [{rows}, {cols}] needs {expected}")))
        }
    })
}
