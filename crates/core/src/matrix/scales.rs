//! 8-bit weights with float32 scales, as in safetensors files.

use super::DType;

/// The scales of a matrix: one for each block of rows and columns.
#[derive(Clone, Copy, Debug)]
pub struct Scales<'a> {
    values: &'a [f32],
    block_rows: usize,
    block_cols: usize,
    /// Number of blocks in a row.
    row_blocks: usize,
    /// The row of the scaled matrix at which this matrix begins.
    first_row: usize,
}

impl<'a> Scales<'a> {
    /// Creates the scales of a matrix `[rows, cols]`. The error is the required number of values.
    pub(crate) fn new(
        values: &'a [f32],
        [rows, cols]: [usize; 2],
        [block_rows, block_cols]: [usize; 2],
    ) -> Result<Self, usize> {
        let row_blocks = cols.div_ceil(block_cols);
        let needed = rows.div_ceil(block_rows) * row_blocks;
        let scales = Scales { values, block_rows, block_cols, row_blocks, first_row: 0 };
        if values.len() == needed { Ok(scales) } else { Err(needed) }
    }

    /// The scales of `rows` rows, block by block, from the block of the matrix's first row on.
    pub fn values(&self, rows: usize) -> &'a [f32] {
        let (first, last) = (self.first_row / self.block_rows, (self.first_row + rows).div_ceil(self.block_rows));
        &self.values[first * self.row_blocks..last.max(first) * self.row_blocks]
    }

    /// Rows and columns of a block.
    pub fn block(&self) -> [usize; 2] {
        [self.block_rows, self.block_cols]
    }

    /// The matrix's first row in its block.
    pub fn row_of_block(&self) -> usize {
        self.first_row % self.block_rows
    }

    /// The scales of the rows from `row` on.
    pub(crate) fn skip_rows(self, row: usize) -> Self {
        Scales { first_row: self.first_row + row, ..self }
    }

    /// The scales of a row, and the number of columns of a scale.
    fn row(&self, row: usize) -> (&'a [f32], usize) {
        let at = (self.first_row + row) / self.block_rows * self.row_blocks;
        (&self.values[at..at + self.row_blocks], self.block_cols)
    }
}

/// The value of an `F8_E4M3`.
#[inline(always)]
fn e4m3(bits: u8) -> f32 {
    let (sign, rest) = (u32::from(bits & 0x80) << 24, u32::from(bits & 0x7f));
    // The factor 2^120 corrects the bias of the exponent: 7 in e4m3, 127 in float32. It is right for subnormals too.
    let value = f32::from_bits(sign | rest << 20) * f32::from_bits((127 + 120) << 23);
    if rest == 0x7f { f32::NAN } else { value }
}

/// Converts a row of a scaled type: `convert` takes an element and its scale.
#[inline(always)]
pub(crate) fn convert_row<T>(
    bytes: &[u8],
    dtype: DType,
    scales: Option<(&Scales<'_>, usize)>,
    out: &mut [T],
    convert: impl Fn(f32, f32) -> T,
) {
    let (scales, cols) = scales.map_or((&[1.0][..], bytes.len()), |(scales, row)| scales.row(row));
    for ((bytes, out), &scale) in bytes.chunks(cols).zip(out.chunks_mut(cols)).zip(scales) {
        let each = bytes.iter().zip(out);
        match dtype {
            DType::I8 => each.for_each(|(byte, out)| *out = convert(f32::from(*byte as i8), scale)),
            _ => each.for_each(|(byte, out)| *out = convert(e4m3(*byte), scale)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_e4m3_has_its_value() {
        for bits in 0..=u8::MAX {
            let (exponent, fraction) = (i32::from(bits >> 3 & 15), f64::from(bits & 7) / 8.0);
            let size =
                if exponent == 0 { fraction * 2f64.powi(-6) } else { (1.0 + fraction) * 2f64.powi(exponent - 7) };
            let value = f64::from(e4m3(bits));
            match bits & 0x7f {
                0x7f => assert!(value.is_nan()),
                _ => assert_eq!(value, if bits > 127 { -size } else { size }, "{bits:#x}"),
            }
        }
        assert_eq!(e4m3(0x7e), 448.0);
    }
}
