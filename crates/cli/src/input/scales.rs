//! The scales of 8-bit weights, which are a tensor beside the weight.
//!
//! The scales of a weight NAME are NAME_scale or NAME_scale_inv. Both are factors of the weight, in spite of the second
//! name. Scales of activations (`input_scale`) are not read, because hidden states are never rounded.

use crate::input::safetensors::{Header, Stored};
use crate::input::{LoadError, Problem};
use crate::output::line;
use flash_sampling::{DType, Matrix};
use flash_sampling_models::quantization::scale_block;
use memmap2::Mmap;
use safetensors::Dtype;
use std::path::Path;
use std::sync::Arc;

/// What follows a weight's name in the name of its scales.
pub const SUFFIXES: [&str; 2] = ["_scale", "_scale_inv"];

/// The safetensors files of a weight and its scales.
pub trait WeightFiles {
    /// The file, or the folder of all files.
    fn place(&self) -> &Path;

    /// Whether there is a tensor `name`.
    fn has(&self, name: &str) -> bool;

    /// Rows and columns of the block of a scale.
    ///
    /// # Errors
    /// An invalid configuration, or one of other weights.
    fn scale_block(&self) -> Result<[usize; 2], LoadError>;

    /// Calls `work` with the file that has the tensor `name`.
    ///
    /// # Errors
    /// An invalid file, or the problem of `work` with the path of that file.
    fn in_file<R>(
        &self,
        name: &str,
        work: impl FnOnce(&Arc<Mmap>, &Header) -> Result<R, Problem>,
    ) -> Result<R, LoadError>;
}

/// The scales of a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightScales {
    /// One for each block, row by row.
    pub values: Vec<f32>,
    /// Rows and columns of a block.
    pub block: [usize; 2],
}

impl WeightScales {
    /// Reads the scales of a weight `[rows, cols]` of 8 bits.
    ///
    /// # Errors
    /// No scales, scales of another shape or type, values that are not finite, and weights with zero points or with columns
    /// in another order.
    pub fn read(files: &impl WeightFiles, weight: &str, shape: [usize; 2]) -> Result<Self, LoadError> {
        let refused = |reason| Err(Problem::Unusable(reason).at(files.place()));
        let [scale, inverse] = SUFFIXES.map(|suffix| format!("{weight}{suffix}"));
        let shown = line::name(weight);
        let name = match (files.has(&scale), files.has(&inverse)) {
            (true, false) => scale,
            (false, true) => inverse,
            (true, true) => {
                return refused(format!("{shown} has both {shown}_scale and {shown}_scale_inv; only one can be meant"));
            }
            (false, false) => {
                let missing = format!("there is neither {shown}_scale nor {shown}_scale_inv");
                return refused(format!("{shown} has elements of 8 bits without scales: {missing}"));
            }
        };
        if files.has(&format!("{weight}_g_idx")) {
            return refused(format!("{shown}_g_idx gives the columns another order, which is not supported"));
        }
        // Symmetric weights may have zero points that are zero.
        let zero_points = format!("{weight}_zero_point");
        if files.has(&zero_points) {
            let are_zero = files.in_file(&zero_points, |map, header| {
                Ok(map[header.stored(&zero_points)?.range].iter().all(|byte| *byte == 0))
            })?;
            if !are_zero {
                return refused(format!("{shown}_zero_point is not zero, which is not supported"));
            }
        }
        let block = files.scale_block()?;
        files.in_file(&name, |map, header| {
            let stored = header.stored(&name)?;
            WeightScales::of(&name, &stored, &map[stored.range.clone()], shape, block)
        })
    }

    /// The scales in a tensor of these bytes.
    fn of(
        name: &str,
        stored: &Stored<'_>,
        bytes: &[u8],
        [rows, cols]: [usize; 2],
        block: [usize; 2],
    ) -> Result<Self, Problem> {
        let block = scale_block(stored.shape, [rows, cols], block).map_err(|expected| {
            let (tensor, found) = (line::name(name), stored.shape.to_vec());
            Problem::Shape { tensor, found, expected }
        })?;
        let dtype = match stored.dtype {
            Dtype::BF16 => DType::BF16,
            Dtype::F16 => DType::F16,
            Dtype::F32 => DType::F32,
            other => {
                let (tensor, found) = (line::name(name), other.to_string());
                return Err(Problem::DType { tensor, found, expected: "bf16, f16 or f32" });
            }
        };
        let mut values = vec![0.0; bytes.len() / dtype.block_bytes()];
        let matrix = Matrix::from_bytes(bytes, dtype, 1, values.len(), values.len());
        matrix.map_err(|error| Problem::Unusable(format!("{}: {error}", line::name(name))))?.row_to_f32(0, &mut values);
        match values.iter().enumerate().find(|(_, value)| !value.is_finite()) {
            Some((at, value)) => {
                Err(Problem::Unusable(format!("{} has the scale {value} at index {at}", line::name(name))))
            }
            None => Ok(WeightScales { values, block }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Result<WeightScales, String> {
        let stored = Stored { dtype, shape, range: 0..bytes.len() };
        WeightScales::of("w_scale", &stored, bytes, [300, 70], [128, 32]).map_err(|problem| problem.to_string())
    }

    #[test]
    fn the_shape_gives_the_blocks() {
        for (shape, block) in [
            (&[][..], [300, 70]),
            (&[1], [300, 70]),
            (&[1, 1], [300, 70]),
            (&[300], [1, 70]),
            (&[300, 1], [1, 70]),
            (&[3, 3], [128, 32]),
        ] {
            let count: usize = shape.iter().product();
            for (dtype, one) in [
                (Dtype::BF16, &half::bf16::from_f32(0.5).to_le_bytes()[..]),
                (Dtype::F16, &half::f16::from_f32(0.5).to_le_bytes()),
                (Dtype::F32, &0.5f32.to_le_bytes()),
            ] {
                let expected = WeightScales { values: vec![0.5; count], block };
                assert_eq!(of(dtype, shape, &one.repeat(count)), Ok(expected), "{shape:?}");
            }
        }
        for shape in [&[0][..], &[2], &[299], &[1, 300], &[3, 2], &[70], &[300, 3], &[300, 1, 1]] {
            let bytes = vec![0; shape.iter().product::<usize>() * 4];
            let says = format!(
                "w_scale has shape {shape:?}, expected [], [1], [300], [300, 1], or [3, 3] for blocks of 128 x 32"
            );
            assert_eq!(of(Dtype::F32, shape, &bytes), Err(says));
        }
    }

    #[test]
    fn scales_are_finite_floats() {
        let bytes: Vec<u8> = [0.0f32, -1.0, f32::INFINITY].repeat(100).iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(of(Dtype::F32, &[300], &bytes), Err("w_scale has the scale inf at index 2".into()));
        assert_eq!(of(Dtype::BF16, &[1], &[0xc0, 0x7f]), Err("w_scale has the scale NaN at index 0".into()));
        let says = "w_scale has dtype F8_E8M0, expected bf16, f16 or f32";
        assert_eq!(of(Dtype::F8_E8M0, &[1], &[0]), Err(says.into()));
    }
}
