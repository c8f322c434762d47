//! Dot products in AMX-BF16 tiles, through stable inline assembly.
//!
//! The weight is the A operand: 16 rows x 32 elements a tile, loaded as they lie in memory. The hidden states are the
//! B operand, packed once per call. An output's sum runs over hidden in ascending steps of 32, whatever the batch.
//!
//! Deviations from the plain triple loop, and why each keeps the answer:
//! 1. Up to 16 rows, 64 weight rows by 16 hidden rows at a time (4 x 1 tiles): the weight streams from memory once.
//! 2. Above, 32 by 32 (2 x 2 tiles), and hidden is cut into slabs of [`SLAB`] steps so that a slab of the batch stays in
//!    the second-level cache for the whole vocabulary tile. Accumulators go to memory between slabs as float32, which
//!    is what they are, so no bit changes.
//! 3. A tile with missing rows, or a hidden size that is no multiple of 32, is copied next to zeros first.
//!
//! Every assembly block sets the tile configuration up and releases it, so no state outlives it.

use super::pack::{Line, Packed};
use super::{DotScratch, TILE};
use core::arch::asm;
use core::arch::x86_64::__cpuid_count;
use flash_sampling_core::Matrix;

/// Steps of 32 elements in a slab.
const SLAB: usize = 32;
/// Bytes of a tile: 16 rows of 64.
const TILE_BYTES: usize = 1024;

/// Whether the processor has AMX-BF16 and the operating system grants it.
pub(crate) fn is_available() -> bool {
    let leaf = __cpuid_count(7, 0);
    let (bf16, tile) = (leaf.edx >> 22 & 1, leaf.edx >> 24 & 1);
    bf16 == 1 && tile == 1 && os_keeps_tiles() && request_permission()
}

/// Whether the operating system saves the tile state (XCR0 bits 17 and 18).
fn os_keeps_tiles() -> bool {
    if __cpuid_count(1, 0).ecx >> 27 & 1 == 0 {
        return false;
    }
    let low: u32;
    // SAFETY: OSXSAVE is set, so `xgetbv` with register 0 is allowed; it has no other effect.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack)) };
    low >> 17 & 3 == 3
}

/// Asks Linux for the tile state: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), for the whole process.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    let result: isize;
    // SAFETY: a system call that only changes what this process may do; rcx and r11 are its clobbers.
    unsafe {
        asm!("syscall", inlateout("rax") 158isize => result, in("rdi") 0x1023, in("rsi") 18,
             lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}

/// Palette 1, all eight tiles 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    column_bytes: [u16; 16],
    rows: [u8; 16],
}

const fn config() -> Config {
    let mut c = Config { palette: 1, start_row: 0, reserved: [0; 14], column_bytes: [0; 16], rows: [0; 16] };
    let mut t = 0;
    while t < 8 {
        c.column_bytes[t] = 64;
        c.rows[t] = 16;
        t += 1;
    }
    c
}

static CONFIG: Config = config();

/// Reserves what [`tile`] needs for up to `rows` hidden rows.
pub(super) fn reserve(scratch: &mut DotScratch, rows: usize, cols: usize) {
    scratch.sums = vec![Line::ZERO; TILE / 16 * rows.div_ceil(32) * 2 * TILE_BYTES / 64];
    scratch.padded = vec![Line::ZERO; TILE * cols.next_multiple_of(32) * 2 / 64];
}

/// `C += A x B` for 4 x 1 tiles: 64 weight rows, 16 hidden rows, `steps` steps. C is four tiles one after another.
///
/// # Safety
/// AMX-BF16 is available and permitted; `a` has 64 rows, `a_stride` bytes apart, of `64 * steps` bytes; `b` has `steps`
/// tiles; `c` has 4 tiles.
unsafe fn multiply_4x1(a: *const u8, a_stride: usize, b: *const u8, steps: usize, c: *mut u8) {
    // SAFETY: by this function's contract; the block writes only to `c`, and clobbers what it declares.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tileloadd tmm0, [{c} + {line}]",
            "tileloadd tmm1, [{c} + {line} + 1024]",
            "tileloadd tmm2, [{c} + {line} + 2048]",
            "tileloadd tmm3, [{c} + {line} + 3072]",
            "2:",
            "tileloadd tmm4, [{b} + {line}]",
            "tileloadd tmm5, [{a0} + {stride}]",
            "tileloadd tmm6, [{a1} + {stride}]",
            "tdpbf16ps tmm0, tmm5, tmm4",
            "tileloadd tmm7, [{a2} + {stride}]",
            "tdpbf16ps tmm1, tmm6, tmm4",
            "tileloadd tmm5, [{a3} + {stride}]",
            "tdpbf16ps tmm2, tmm7, tmm4",
            "tdpbf16ps tmm3, tmm5, tmm4",
            "add {b}, 1024",
            "add {a0}, 64",
            "add {a1}, 64",
            "add {a2}, 64",
            "add {a3}, 64",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c} + {line}], tmm0",
            "tilestored [{c} + {line} + 1024], tmm1",
            "tilestored [{c} + {line} + 2048], tmm2",
            "tilestored [{c} + {line} + 3072], tmm3",
            "tilerelease",
            config = in(reg) &CONFIG,
            line = in(reg) 64usize,
            stride = in(reg) a_stride,
            a0 = inout(reg) a => _,
            a1 = inout(reg) a.add(16 * a_stride) => _,
            a2 = inout(reg) a.add(32 * a_stride) => _,
            a3 = inout(reg) a.add(48 * a_stride) => _,
            b = inout(reg) b => _,
            c = in(reg) c,
            steps = inout(reg) steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// `C += A x B` for 2 x 2 tiles: 32 weight rows, 32 hidden rows. C is the tiles (A0 B0), (A1 B0), (A0 B1), (A1 B1):
/// the first two at `c0`, the others at `c1`.
///
/// # Safety
/// As for [`multiply_4x1`], with 32 rows of A, two B panels, and two tiles at each of `c0` and `c1`.
unsafe fn multiply_2x2(a: *const u8, a_stride: usize, b: [*const u8; 2], steps: usize, c: [*mut u8; 2]) {
    // SAFETY: by this function's contract; the block writes only to `c`, and clobbers what it declares.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tileloadd tmm0, [{c0} + {line}]",
            "tileloadd tmm1, [{c0} + {line} + 1024]",
            "tileloadd tmm2, [{c1} + {line}]",
            "tileloadd tmm3, [{c1} + {line} + 1024]",
            "2:",
            "tileloadd tmm4, [{b0} + {line}]",
            "tileloadd tmm5, [{a0} + {stride}]",
            "tileloadd tmm6, [{a1} + {stride}]",
            "tdpbf16ps tmm0, tmm5, tmm4",
            "tileloadd tmm7, [{b1} + {line}]",
            "tdpbf16ps tmm1, tmm6, tmm4",
            "tdpbf16ps tmm2, tmm5, tmm7",
            "tdpbf16ps tmm3, tmm6, tmm7",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "add {a0}, 64",
            "add {a1}, 64",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c0} + {line}], tmm0",
            "tilestored [{c0} + {line} + 1024], tmm1",
            "tilestored [{c1} + {line}], tmm2",
            "tilestored [{c1} + {line} + 1024], tmm3",
            "tilerelease",
            config = in(reg) &CONFIG,
            line = in(reg) 64usize,
            stride = in(reg) a_stride,
            a0 = inout(reg) a => _,
            a1 = inout(reg) a.add(16 * a_stride) => _,
            b0 = inout(reg) b[0] => _,
            b1 = inout(reg) b[1] => _,
            c0 = in(reg) c[0],
            c1 = in(reg) c[1],
            steps = inout(reg) steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// The rows of a tile as A operands: where they are, and how far apart.
struct Weights {
    at: *const u8,
    stride: usize,
}

/// The weight where it lies, or a copy next to zeros when it does not fill whole tiles.
fn whole_tiles(weight: &Matrix<'_>, group: usize, padded: &mut [Line]) -> Weights {
    let bytes = weight.cols() * 2;
    if weight.cols() % 32 == 0 && weight.rows() % group == 0 {
        return Weights { at: weight.bytes().as_ptr(), stride: weight.row_stride() * 2 };
    }
    let stride = bytes.next_multiple_of(64);
    padded[..weight.rows().next_multiple_of(group) * stride / 64].fill(Line::ZERO);
    let at: *mut u8 = padded.as_mut_ptr().cast();
    for i in 0..weight.rows() {
        let row = weight.row_bytes(i);
        assert!((i + 1) * stride <= size_of_val(padded));
        // SAFETY: the row fits, by the assertion, and the regions are different allocations.
        unsafe { core::ptr::copy_nonoverlapping(row.as_ptr(), at.add(i * stride), bytes) };
    }
    Weights { at, stride }
}

/// See [`super::lanes::tile`]; `scratch` was reserved by [`reserve`] for at least this many rows and columns.
///
/// # Safety
/// AMX-BF16 and AVX-512 are available; `weight` holds bf16 and at most [`TILE`] rows; `hidden` is in AMX layout with the
/// same columns; `out` holds [`TILE`] floats a hidden row.
pub(super) unsafe fn tile(weight: &Matrix<'_>, hidden: &Packed, out: &mut [f32], scratch: &mut DotScratch) {
    let rows = hidden.rows();
    let steps = weight.cols().div_ceil(32);
    let group = if rows <= 16 { 64 } else { 32 };
    let a = whole_tiles(weight, group, &mut scratch.padded);
    let groups = weight.rows().div_ceil(group);
    let panels = rows.div_ceil(16);
    // Sums: panel by panel, TILE / 16 tiles each.
    let needed = panels.next_multiple_of(2) * (TILE / 16) * TILE_BYTES / 64;
    scratch.sums[..needed].fill(Line::ZERO);
    let sums: *mut u8 = scratch.sums.as_mut_ptr().cast();
    let panel_bytes = 16 * hidden.row_bytes();
    let slab = if rows <= 16 { steps } else { SLAB };
    for from in (0..steps).step_by(slab) {
        let length = slab.min(steps - from);
        for panel in (0..panels).step_by(if rows <= 16 { 1 } else { 2 }) {
            // An odd last panel is multiplied twice; the copy's sums are never read.
            let other = (panel + 1).min(panels - 1);
            for g in 0..groups {
                // SAFETY: the group's rows and the panels' tiles exist (`whole_tiles` has filled up what was missing),
                // and `needed` has room for the tiles that are written.
                unsafe {
                    let a_at = a.at.add(g * group * a.stride + from * 64);
                    let b_at = |p: usize| hidden.as_ptr().add(p * panel_bytes + from * TILE_BYTES);
                    let c_at = |p: usize| sums.add((p * (TILE / 16) + g * group / 16) * TILE_BYTES);
                    if group == 64 {
                        multiply_4x1(a_at, a.stride, b_at(panel), length, c_at(panel));
                    } else {
                        multiply_2x2(
                            a_at,
                            a.stride,
                            [b_at(panel), b_at(other)],
                            length,
                            [c_at(panel), c_at(panel + 1)],
                        );
                    }
                }
            }
        }
    }
    for r in 0..rows {
        for i in 0..weight.rows() {
            let tile = r / 16 * (TILE / 16) + i / 16;
            // SAFETY: inside the `needed` lines; written above as float32.
            out[r * TILE + i] = unsafe { sums.add(tile * TILE_BYTES + i % 16 * 64 + r % 16 * 4).cast::<f32>().read() };
        }
    }
}
