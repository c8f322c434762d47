//! The tile unit in plain Rust, for tests of the loop nest on machines without AMX.

use super::{Amx, Block, Unit, scratch, tile_on};
use crate::dot::TILE;
use crate::dot::pack::{Layout, Packed, PackedRows};
use crate::isa::Isa;
use flash_sampling_core::Matrix;
use half::bf16;

/// Plain Rust: sums of bf16, or of bytes.
struct Plain<const INTEGERS: bool = false>;

// SAFETY (every block below): the pointers belong to a block or a tile, and the elements are inside them.
impl<const INTEGERS: bool> Unit for Plain<INTEGERS> {
    unsafe fn begin() {}
    unsafe fn end() {}

    unsafe fn multiply(block: &Block, share: usize) {
        assert!(block.steps > 0 && [0, 4, 8, 16, 32].contains(&share));
        for step in 0..block.steps {
            for tile in 0..4 {
                for (m, n) in (0..256).map(|i| (i / 16, i % 16)) {
                    // SAFETY: as above.
                    unsafe {
                        if INTEGERS {
                            let a = block.a.add((step * 2 + tile % 2) * 1024 + m * 64).cast::<i8>();
                            let b = block.b[tile / 2].add(step * 1024 + n * 4).cast::<i8>();
                            let c = block.c.add(tile * 1024 + m * 64 + n * 4).cast::<i32>();
                            for k in 0..64 {
                                *c += i32::from(a.add(k).read()) * i32::from(b.add(k / 4 * 64 + k % 4).read());
                            }
                            continue;
                        }
                        let a = block.a.add((step * 2 + tile % 2) * 1024 + m * 64).cast::<bf16>();
                        let b = block.b[tile / 2].add(step * 1024 + n * 4).cast::<bf16>();
                        let c = block.c.add(tile * 1024 + m * 64 + n * 4).cast::<f32>();
                        for k in 0..32 {
                            *c += a.add(k).read().to_f32() * b.add(k / 2 * 32 + k % 2).read().to_f32();
                        }
                    }
                }
            }
            for row in 0..share {
                // SAFETY: as above; the weight need not be aligned.
                unsafe {
                    let line = block.source.add(row * block.stride + step * 64).cast::<[u8; 64]>().read_unaligned();
                    block.target.add(step * 2048 + row * 64).cast::<[u8; 64]>().write(line);
                }
            }
        }
    }

    unsafe fn turn(tile: *const f32, out: *mut f32, rows: usize, count: usize) {
        for (row, i) in (0..rows * count).map(|at| (at / count, at % count)) {
            // SAFETY: as above.
            unsafe { *out.add(row * TILE + i) = *tile.add(i * 16 + row) };
        }
    }
}

/// [`integer_tile`](super::integer_tile) in plain Rust.
pub(crate) fn integer_tile(codes: &Matrix<'_>, digits: PackedRows<'_>, out: &mut [f32]) {
    // SAFETY: plain Rust is always available; the sizes are right.
    unsafe { tile_on::<Plain<true>>(codes, digits, out, &mut scratch(digits.rows())) }
}

/// Computes the dot products of a tile with the unit `U`.
///
/// # Safety
/// The unit of `U` is available.
unsafe fn dots<U: Unit>(weight: &Matrix<'_>, hidden: &Matrix<'_>) -> Vec<f32> {
    let mut packed = Packed::new(hidden.rows(), hidden.cols());
    packed.pack(Layout::Amx, hidden);
    let mut scratch = scratch(hidden.rows());
    let mut out = vec![f32::NAN; hidden.rows() * TILE];
    // SAFETY: by this function's contract; the types, the layout and the sizes are right.
    unsafe { tile_on::<U>(weight, packed.all(), &mut out, &mut scratch) };
    out
}

/// Returns small integers, so that every order of summation gives the same bits.
fn integers(len: usize, salt: usize) -> Vec<bf16> {
    (0..len).map(|i| bf16::from_f32((((i + salt) * 7919 % 1009) % 9) as f32 - 4.0)).collect()
}

/// Complete and incomplete tiles, chunks of one size and of two, one slab and several, every share.
const SIZES: [(usize, usize, usize, usize); 11] = [
    (256, 1, 256, 256),
    (256, 16, 512, 512),
    (250, 17, 288, 300),
    (33, 33, 1000, 1001),
    (64, 50, 31, 40),
    (1, 64, 896, 896),
    (256, 100, 640, 640),
    (224, 130, 96, 96),
    (96, 256, 4096, 4096),
    (40, 300, 2080, 2090),
    (70, 257, 2100, 2100),
];

fn check<U: Unit>() {
    for (rows, batch, cols, stride) in SIZES {
        let (w, h) = (integers(rows * stride, 1), integers(batch * cols, 500));
        // At an odd address, as is possible in a mapped file.
        let mut bytes = vec![0u8; 1 + w.len() * 2];
        w.iter().zip(bytes[1..].chunks_exact_mut(2)).for_each(|(w, b)| b.copy_from_slice(&w.to_ne_bytes()));
        let weight = Matrix::from_bytes(&bytes[1..], flash_sampling_core::DType::BF16, rows, cols, stride).unwrap();
        // SAFETY: the tests call `check` only for available units.
        let out = unsafe { dots::<U>(&weight, &Matrix::new(&h, batch, cols).unwrap()) };
        for (at, &value) in out.iter().enumerate() {
            let (r, i) = (at / TILE, at % TILE);
            if i >= rows {
                assert!(value.is_nan(), "{rows} {batch} {cols}: [{r}, {i}] was written");
            } else if (r * 31 + i * 7) % 13 == 0 || cols < 300 {
                let terms = w[i * stride..][..cols].iter().zip(&h[r * cols..][..cols]);
                let want: f32 = terms.map(|(w, h)| w.to_f32() * h.to_f32()).sum();
                assert_eq!(value, want, "{rows} {batch} {cols}: [{r}, {i}]");
            }
        }
    }
}

#[test]
fn every_share_slab_and_chunk_gives_the_dot_products() {
    check::<Plain>();
    if Isa::Amx.is_available() {
        check::<Amx>();
    }
}

#[test]
fn a_tile_without_rows_is_nothing_to_do() {
    let (w, h) = (integers(96, 1), integers(96, 500));
    let (w, h) = (Matrix::new(&w, 1, 96).unwrap(), Matrix::new(&h, 1, 96).unwrap());
    // SAFETY: plain Rust is always available.
    let out = unsafe { dots::<Plain>(&w.row_range(1..1), &h) };
    assert!(out.iter().all(|value| value.is_nan()));
}

#[test]
fn the_order_of_a_sum_does_not_depend_on_the_batch() {
    let (cols, rows) = (2400, 64);
    let value = |i: usize| bf16::from_f32((i * 7919 % 1009) as f32 / 504.5 - 1.0);
    let (w, h): (Vec<bf16>, Vec<bf16>) =
        ((0..rows * cols).map(value).collect(), (7..7 + 250 * cols).map(value).collect());
    let (w, h) = (Matrix::new(&w, rows, cols).unwrap(), Matrix::new(&h, 250, cols).unwrap());
    // SAFETY: plain Rust is always available.
    let whole = unsafe { dots::<Plain>(&w, &h) };
    for (batch, tokens) in [(3..4, 0..rows), (60..100, 0..rows), (0..249, 5..40)] {
        // SAFETY: as above.
        let part = unsafe { dots::<Plain>(&w.row_range(tokens.clone()), &h.row_range(batch.clone())) };
        for (r, row) in batch.enumerate() {
            let (a, b) = (&part[r * TILE..][..tokens.len()], &whole[row * TILE..][tokens.clone()]);
            assert_eq!(a, b, "row {row}");
        }
    }
}
