//! The two register blocks, in assembly. Each sets the tile configuration up and releases it, so no state outlives it.

use core::arch::asm;

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

/// `C += A x B` for 4 x 1 tiles: 64 weight rows, 16 hidden rows, `steps` steps. C is four tiles one after another.
///
/// # Safety
/// AMX-BF16 is available and permitted; `a` points to 4 runs of `steps` tiles, `a_run` bytes apart, and `steps` is not
/// zero; `b` has `steps` tiles; `c` has 4 tiles.
pub(super) unsafe fn multiply_4x1(a: *const u8, a_run: usize, b: *const u8, steps: usize, c: *mut u8) {
    // SAFETY: by this function's contract; the block writes only to `c`, and clobbers what it declares.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tileloadd tmm0, [{c} + {line}*1]",
            "tileloadd tmm1, [{c} + {line}*1 + 1024]",
            "tileloadd tmm2, [{c} + {line}*1 + 2048]",
            "tileloadd tmm3, [{c} + {line}*1 + 3072]",
            "2:",
            "tileloadd tmm4, [{b} + {line}*1]",
            "tileloadd tmm5, [{a0} + {line}*1]",
            "tileloadd tmm6, [{a1} + {line}*1]",
            "tdpbf16ps tmm0, tmm5, tmm4",
            "tileloadd tmm7, [{a2} + {line}*1]",
            "tdpbf16ps tmm1, tmm6, tmm4",
            "tileloadd tmm5, [{a3} + {line}*1]",
            "tdpbf16ps tmm2, tmm7, tmm4",
            "tdpbf16ps tmm3, tmm5, tmm4",
            "add {b}, 1024",
            "add {a0}, 1024",
            "add {a1}, 1024",
            "add {a2}, 1024",
            "add {a3}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c} + {line}*1], tmm0",
            "tilestored [{c} + {line}*1 + 1024], tmm1",
            "tilestored [{c} + {line}*1 + 2048], tmm2",
            "tilestored [{c} + {line}*1 + 3072], tmm3",
            "tilerelease",
            config = in(reg) &CONFIG,
            line = in(reg) 64usize,
            a0 = inout(reg) a => _,
            a1 = inout(reg) a.add(a_run) => _,
            a2 = inout(reg) a.add(2 * a_run) => _,
            a3 = inout(reg) a.add(3 * a_run) => _,
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
/// the first two at `c[0]`, the others at `c[1]`.
///
/// # Safety
/// As for [`multiply_4x1`], with 2 runs of A, two runs of B, and two tiles at each of `c[0]` and `c[1]`.
pub(super) unsafe fn multiply_2x2(a: *const u8, a_run: usize, b: [*const u8; 2], steps: usize, c: [*mut u8; 2]) {
    // SAFETY: by this function's contract; the block writes only to `c`, and clobbers what it declares.
    unsafe {
        asm!(
            "ldtilecfg [{config}]",
            "tileloadd tmm0, [{c0} + {line}*1]",
            "tileloadd tmm1, [{c0} + {line}*1 + 1024]",
            "tileloadd tmm2, [{c1} + {line}*1]",
            "tileloadd tmm3, [{c1} + {line}*1 + 1024]",
            "2:",
            "tileloadd tmm4, [{b0} + {line}*1]",
            "tileloadd tmm5, [{a0} + {line}*1]",
            "tileloadd tmm6, [{a1} + {line}*1]",
            "tdpbf16ps tmm0, tmm5, tmm4",
            "tileloadd tmm7, [{b1} + {line}*1]",
            "tdpbf16ps tmm1, tmm6, tmm4",
            "tdpbf16ps tmm2, tmm5, tmm7",
            "tdpbf16ps tmm3, tmm6, tmm7",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "add {a0}, 1024",
            "add {a1}, 1024",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c0} + {line}*1], tmm0",
            "tilestored [{c0} + {line}*1 + 1024], tmm1",
            "tilestored [{c1} + {line}*1], tmm2",
            "tilestored [{c1} + {line}*1 + 1024], tmm3",
            "tilerelease",
            config = in(reg) &CONFIG,
            line = in(reg) 64usize,
            a0 = inout(reg) a => _,
            a1 = inout(reg) a.add(a_run) => _,
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
