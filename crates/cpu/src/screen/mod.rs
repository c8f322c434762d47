//! Upper bounds of logits from 8-bit products, which select the tokens that get their logit from the weight.
//!
//! Plain version, for a row of a call:
//! ```text
//! for each token: best = merge(best, (logit + gumbel, token))
//! ```
//! Deviation: a token whose upper bound scores below the best so far cannot win, so its logit is not computed. All
//! transforms of logits are monotone, also in float32, so the bound of a dot product becomes a bound of the score. A
//! token that may win gets its logit by the kernel of `dot`, so the winner has the bits of a pass without bounds. A row
//! takes a pass without bounds if a number is not finite, or if a draw has no token.
//!
//! The products are of a head's [`Shadow`](flash_sampling_core::Shadow), or of the codes of a quantised weight, with
//! hidden states in two digits of 8 bits. Proof of the bounds: `docs/exactness.md`.

#[cfg(target_arch = "x86_64")]
mod codes;
mod digits;
mod plain;
#[cfg(target_arch = "x86_64")]
mod vnni;

use crate::dot::TILE;
use crate::isa::Isa;
use crate::options::Threads;
use core::ops::Range;
pub(crate) use digits::{Digits, Sums};
use flash_sampling_core::backend::canonical::{extra_terms, norm};
use flash_sampling_core::{DType, Head, Matrix, Shadow};
use rayon::prelude::*;

/// With more columns, integer sums may overflow.
const MAX_COLS: usize = 1 << 17;

/// What a head's upper bounds need, computed once.
#[derive(Debug)]
pub(crate) struct Screen {
    /// The norms of a quantised weight's rows; empty for a head with a shadow.
    norms: Vec<f32>,
    /// The largest norm plus error of a token.
    largest: f64,
    terms: usize,
    isa: Isa,
    has_vnni: bool,
}

/// Whether the processor has AVX-512 VNNI.
fn has_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512vnni");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

impl Screen {
    /// Prepares upper bounds, if bounds take less time than logits for this head on this instruction set.
    pub(crate) fn new(head: &Head<'_>, isa: Isa, threads: &Threads) -> Option<Self> {
        let weight = head.weight();
        let has_vnni = matches!(isa, Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx) && has_vnni();
        if weight.cols() > MAX_COLS {
            return None;
        }
        let (norms, largest) = match head.shadow() {
            Some(shadow) => (Vec::new(), largest_size(&shadow)),
            None if has_vnni && weight.dtype().block_elements() > 1 && weight.cols().is_multiple_of(64) => {
                let norms = threads.install(|| norms(&weight));
                let largest = norms.iter().fold(0.0, |most: f64, norm| most.max(f64::from(*norm)));
                (norms, largest)
            }
            None => return None,
        };
        let terms = weight.cols() + extra_terms(weight.dtype());
        Some(Screen { norms, largest, terms, isa, has_vnni })
    }

    /// Whether this head is the head of [`Screen::new`], as far as the bounds need.
    pub(crate) fn fits(&self, head: &Head<'_>) -> bool {
        head.shadow().is_some() == self.norms.is_empty()
    }

    /// Whether bounds take less time than logits in a call of `rows` rows.
    pub(crate) fn pays(&self, _head: &Head<'_>, rows: usize) -> bool {
        rows <= if self.norms.is_empty() { 64 } else { 8 }
    }

    /// Creates the memory for hidden states.
    pub(crate) fn digits(&self, max_rows: usize, head: &Head<'_>) -> Digits {
        #[cfg(target_arch = "x86_64")]
        macro_rules! sums {
            ($format:ident) => {
                vnni::sums::<$format>()
            };
        }
        #[cfg(target_arch = "x86_64")]
        let sums = crate::dot::blocks::for_format!(head.weight().dtype(), sums, Sums::None);
        #[cfg(not(target_arch = "x86_64"))]
        let sums = Sums::None;
        Digits::new(max_rows, head.hidden(), sums)
    }

    /// Packs hidden states.
    pub(crate) fn pack(&self, hidden: &Matrix<'_>, digits: &mut Digits) {
        digits.pack(hidden, self.largest, self.terms);
    }

    /// Writes to `out[r * TILE + i]` an upper bound of the dot product of row `i` of the weight's rows `rows` (at most
    /// [`TILE`]) and row `r` of `hidden`. For a row without bounds, writes NaN.
    pub(crate) fn tile(&self, head: &Head<'_>, rows: Range<usize>, hidden: &Digits, out: &mut [f32]) {
        let count = rows.len();
        assert!(count <= TILE && out.len() >= hidden.rows.len().saturating_sub(1) * TILE + count);
        let (ones, zeros) = ([1.0; TILE], [0.0; TILE]);
        let (scales, errors, norms) = match head.shadow() {
            Some(shadow) => {
                let shadow = shadow.row_range(rows);
                self.multiply_shadow(&shadow, hidden, out);
                (shadow.scales(), shadow.errors(), shadow.norms())
            }
            None => {
                self.multiply_blocks(&head.weight().row_range(rows.clone()), hidden, out);
                (&ones[..count], &zeros[..count], &self.norms[rows])
            }
        };
        for (r, row) in hidden.rows.iter().enumerate() {
            let out = &mut out[r * TILE..][..count];
            let Some(bound) = row.bound else {
                out.fill(f32::NAN);
                continue;
            };
            for (out, ((scale, error), norm)) in out.iter_mut().zip(scales.iter().zip(errors).zip(norms)) {
                *out = *out * (scale * row.scale) + bound.of(*error, *norm);
            }
        }
    }

    fn multiply_shadow(&self, shadow: &Shadow<'_>, hidden: &Digits, out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if self.has_vnni {
            let stride = flash_sampling_core::backend::code_stride(shadow.cols());
            let codes = shadow.codes().as_ptr().cast();
            let (rows, groups, out) = (shadow.rows(), stride / 64, out.as_mut_ptr());
            // SAFETY: `new` found VNNI beside AVX-512. The shadow has `rows` rows of whole groups; the hidden rows are
            // as long, and `tile` has checked the size of `out`.
            return unsafe {
                vnni::Operands { codes, stride, rows, hidden, groups, out }.multiply::<codes::ShadowCodes>()
            };
        }
        match self.isa {
            Isa::Portable => plain::portable(shadow, hidden, out),
            // SAFETY: the instruction set was checked at planning.
            #[cfg(target_arch = "aarch64")]
            _ => unsafe { plain::neon(shadow, hidden, out) },
            // SAFETY: as above; every other instruction set of this architecture includes AVX2.
            #[cfg(target_arch = "x86_64")]
            _ => unsafe { plain::avx2(shadow, hidden, out) },
            #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
            _ => plain::portable(shadow, hidden, out),
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn multiply_blocks(&self, weight: &Matrix<'_>, hidden: &Digits, out: &mut [f32]) {
        let (codes, stride, rows) = (weight.bytes().as_ptr(), weight.row_stride_bytes(), weight.rows());
        let all = vnni::Operands { codes, stride, rows, hidden, groups: weight.cols() / 64, out: out.as_mut_ptr() };
        macro_rules! multiply {
            ($format:ident) => {
                // SAFETY: as for shadows. `new` has checked that a row has whole units.
                unsafe { all.multiply::<$format>() }
            };
        }
        crate::dot::blocks::for_format!(weight.dtype(), multiply, unreachable!("a type without blocks"));
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn multiply_blocks(&self, _: &Matrix<'_>, _: &Digits, _: &mut [f32]) {
        unreachable!("quantised weights have bounds only with VNNI");
    }
}

/// The largest norm plus error of a row.
fn largest_size(shadow: &Shadow<'_>) -> f64 {
    let sizes = shadow.norms().iter().zip(shadow.errors());
    sizes.fold(0.0, |most, (norm, error)| most.max(f64::from(*norm) + f64::from(*error)))
}

/// Upper bounds of the norms of a quantised weight's rows.
fn norms(weight: &Matrix<'_>) -> Vec<f32> {
    let of_row = |row: &mut Vec<f32>, r: usize| {
        row.resize(weight.cols(), 0.0);
        weight.row_magnitudes(r, row);
        // The sum of squares has float64 roundings only.
        let norm = ((norm(row) * (1.0 + 1e-6)) as f32).next_up();
        if norm.is_nan() { f32::INFINITY } else { norm }
    };
    (0..weight.rows()).into_par_iter().map_init(Vec::new, of_row).collect()
}

#[cfg(test)]
mod tests;
