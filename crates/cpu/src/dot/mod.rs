//! Dot products of one vocabulary tile with every hidden state of the batch. README.md in this folder has the design.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod lanes;
pub(crate) mod pack;
mod portable;

use crate::isa::Isa;
use flash_sampling_core::{DType, Matrix};
use pack::{Layout, Packed};

/// Tokens per tile. The logits of a tile are `[rows, TILE]`; no larger array of logits exists.
pub(crate) const TILE: usize = 256;

/// The memory for the dot products of one worker.
#[derive(Debug, Default)]
pub(crate) struct DotScratch {
    /// AMX accumulators, ordered by tile.
    pub(crate) sums: Vec<pack::Line>,
    /// Weight rows copied into AMX tiles.
    pub(crate) tiles: Vec<pack::Line>,
}

/// The dot products with one weight, on one instruction set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dot {
    isa: Isa,
    weight: DType,
}

impl Dot {
    /// Chooses the kernel for these types on an available instruction set.
    pub(crate) fn new(isa: Isa, weight: DType, hidden: DType) -> Self {
        assert!(isa.is_available(), "{isa} was checked at planning");
        Dot { isa: isa.for_types(weight, hidden), weight }
    }

    /// Returns the layout of the hidden states for this kernel.
    pub(crate) fn layout(&self) -> Layout {
        match (self.isa, self.weight) {
            (Isa::Amx, _) => Layout::Amx,
            (Isa::Avx512Bf16, _) => Layout::Bf16,
            (Isa::Avx512, DType::BF16) => Layout::EvenOdd { step: 32 },
            (Isa::Avx2, DType::BF16) => Layout::EvenOdd { step: 16 },
            _ => Layout::F32,
        }
    }

    /// Creates a worker's scratch for up to `rows` rows on an instruction set.
    pub(crate) fn scratch(isa: Isa, rows: usize) -> DotScratch {
        let mut scratch = DotScratch::default();
        #[cfg(target_arch = "x86_64")]
        if isa == Isa::Amx {
            amx::reserve(&mut scratch, rows);
        }
        let _ = (isa, rows);
        scratch
    }

    /// Runs at least `count` multiply-adds with this kernel's instructions and register block, on operands in the
    /// first-level cache: the arithmetic limit of [`Dot::tile`].
    pub(crate) fn products(&self, count: u64) {
        let total = match self.isa {
            Isa::Portable => portable::products(self.weight, count),
            // SAFETY: `new` has checked that the instruction set is available.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::products(self.weight, count) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::products(self.weight, count) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => unsafe { avx512_bf16::products(count) },
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => {
                // SAFETY: as above.
                unsafe { amx::products(count) };
                0.0
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("only the portable instruction set is available here"),
        };
        core::hint::black_box(total);
    }

    /// Writes to `out[r * TILE + i]` the product of row `i` of `weight` (at most [`TILE`] rows) and row `r` of
    /// `hidden`.
    pub(crate) fn tile(&self, weight: &Matrix<'_>, hidden: &Packed, out: &mut [f32], scratch: &mut DotScratch) {
        assert!(weight.rows() <= TILE && weight.dtype() == self.weight);
        assert!(weight.cols() == hidden.cols() && hidden.layout() == self.layout());
        assert!(out.len() >= hidden.rows() * TILE);
        let _ = &scratch;
        match self.isa {
            Isa::Portable => portable::tile(weight, hidden, out),
            // SAFETY: `new` has checked that the instruction set is available; the asserts above check the other
            // requirements.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::tile(weight, hidden, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::tile(weight, hidden, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => unsafe { avx512_bf16::tile(weight, hidden, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => unsafe { amx::tile(weight, hidden, out, scratch) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("only the portable instruction set is available here"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::backend::canonical::{canonical_dot, dot_error_bound, norm};
    use half::{bf16, f16};

    fn value(i: usize, j: usize) -> f32 {
        (((i * 7919 + j * 104_729 + 13) % 1009) as f32 / 504.5 - 1.0) * 3.0
    }

    /// Returns the bytes of a matrix of test values in any type.
    fn bytes(rows: usize, cols: usize, salt: usize, dtype: DType, integers: bool) -> Vec<u8> {
        let values = (0..rows * cols).map(|at| {
            let v = value(at / cols + salt, at % cols);
            if integers { v.round() } else { v }
        });
        match dtype {
            DType::BF16 => values.flat_map(|v| bf16::from_f32(v).to_ne_bytes()).collect(),
            DType::F16 => values.flat_map(|v| f16::from_f32(v).to_ne_bytes()).collect(),
            DType::F32 => values.flat_map(|v| v.to_ne_bytes()).collect(),
        }
    }

    fn run(isa: Isa, weight: &Matrix<'_>, hidden: &Matrix<'_>) -> Vec<f32> {
        let dot = Dot::new(isa, weight.dtype(), hidden.dtype());
        let mut packed = Packed::new(hidden.rows(), hidden.cols());
        packed.pack(dot.layout(), hidden);
        let mut scratch = Dot::scratch(isa, hidden.rows());
        let mut out = vec![f32::NAN; hidden.rows() * TILE];
        dot.tile(weight, &packed, &mut out, &mut scratch);
        out
    }

    const TYPES: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

    #[test]
    fn every_instruction_set_agrees_with_the_canonical_dot() {
        for isa in Isa::available() {
            for weight_type in TYPES {
                for hidden_type in TYPES {
                    for (vocab, rows, cols) in [(1, 1, 1), (5, 3, 31), (256, 7, 64), (100, 17, 97), (67, 40, 130)] {
                        for integers in [true, false] {
                            let w = bytes(vocab, cols, 1, weight_type, integers);
                            let h = bytes(rows, cols, 1000, hidden_type, integers);
                            let w = Matrix::from_bytes(&w, weight_type, vocab, cols, cols).unwrap();
                            let h = Matrix::from_bytes(&h, hidden_type, rows, cols, cols).unwrap();
                            let out = run(isa, &w, &h);
                            let (mut a, mut b) = (vec![0.0; cols], vec![0.0; cols]);
                            for r in 0..rows {
                                h.row_to_f32(r, &mut b);
                                for i in 0..vocab {
                                    w.row_to_f32(i, &mut a);
                                    let exact = canonical_dot(&a, &b);
                                    let error = (f64::from(out[r * TILE + i]) - exact).abs();
                                    let bound = if integers { 0.0 } else { dot_error_bound(cols, norm(&a), norm(&b)) };
                                    assert!(error <= bound, "{isa} {weight_type:?} {hidden_type:?} [{r}, {i}]");
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_every_batch_and_tile() {
        let (vocab, cols) = (200, 333);
        for isa in Isa::available() {
            for dtype in TYPES {
                let w = bytes(vocab, cols, 1, dtype, false);
                let h = bytes(70, cols, 1000, dtype, false);
                let w = Matrix::from_bytes(&w, dtype, vocab, cols, cols).unwrap();
                let h = Matrix::from_bytes(&h, dtype, 70, cols, cols).unwrap();
                let whole = run(isa, &w, &h);
                for rows in [0..1, 3..5, 10..17, 20..70] {
                    for tokens in [0..1, 5..70, 100..200] {
                        let part = run(isa, &w.row_range(tokens.clone()), &h.row_range(rows.clone()));
                        for (r, row) in rows.clone().enumerate() {
                            for (i, token) in tokens.clone().enumerate() {
                                let (a, b) = (part[r * TILE + i], whole[row * TILE + token]);
                                assert_eq!(a.to_bits(), b.to_bits(), "{isa} {dtype:?} row {row} token {token}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn nan_and_infinity_pass_through() {
        for isa in Isa::available() {
            let mut w = vec![bf16::ONE; 3 * 40];
            w[45] = bf16::NAN;
            w[85] = bf16::INFINITY;
            let h = vec![bf16::ONE; 40];
            let out = run(isa, &Matrix::new(&w, 3, 40).unwrap(), &Matrix::new(&h, 1, 40).unwrap());
            assert!(out[0] == 40.0 && out[1].is_nan() && out[2] == f32::INFINITY, "{isa}: {:?}", &out[..3]);
        }
    }

    #[test]
    fn strides_and_odd_addresses_are_fine() {
        for isa in Isa::available() {
            let raw = bytes(40, 50, 3, DType::BF16, true);
            let mut shifted = vec![0u8];
            shifted.extend_from_slice(&raw);
            let w = Matrix::from_bytes(&raw, DType::BF16, 40, 33, 50).unwrap();
            let odd = Matrix::from_bytes(&shifted[1..], DType::BF16, 40, 33, 50).unwrap();
            let h = bytes(2, 33, 9, DType::BF16, true);
            let h = Matrix::from_bytes(&h, DType::BF16, 2, 33, 33).unwrap();
            let (a, b) = (run(isa, &w, &h), run(isa, &odd, &h));
            assert_eq!(a[..40], b[..40], "{isa}");
        }
    }
}
