//! The register block in assembly: 2 x 2 tiles, with the copy of the next unit's weights between the products.
//!
//! A step has four products, which keep the tile unit busy for 64 cycles, and four loads of tiles, which take half of
//! that. The other loads and stores fill the gaps: for each of `share` weight rows, one line is copied to its place in
//! a tile, and one line is prefetched. There is one block of assembly for each `share`.
//!
//! B is loaded with a hint not to fill the first-level cache (`tileloaddt1`): a unit's hidden states are many times
//! larger than this cache, and evicted A from it.

use super::{Amx, AmxIntegers, Block, Unit};
use core::arch::asm;

/// The sizes of the eight tiles, in palette 1.
#[repr(C, align(64))]
pub(crate) struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    column_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// Tiles of these bytes of a row, and of these rows.
    pub(crate) const fn new(column_bytes: [u16; 8], rows: [u8; 8]) -> Self {
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], column_bytes: [0; 16], rows: [0; 16] };
        let mut tile = 0;
        while tile < 8 {
            (config.column_bytes[tile], config.rows[tile]) = (column_bytes[tile], rows[tile]);
            tile += 1;
        }
        config
    }
}

static CONFIG: Config = Config::new([64; 8], [16; 8]);

/// Copies one line of each of four weight rows, starting at `{s}`, to four lines at `{target}` + 256 `$at`. Prefetches
/// the same lines of a later unit, starting at `{p}`.
macro_rules! copy_four {
    ($at:literal) => {
        concat!(
            "prefetcht1 [{p}]\n",
            "prefetcht1 [{p} + {stride}]\n",
            "prefetcht1 [{p} + 2*{stride}]\n",
            "prefetcht1 [{p} + {three}]\n",
            "lea {p}, [{p} + 4*{stride}]\n",
            "vmovdqu64 zmm0, [{s}]\n",
            "vmovdqu64 zmm1, [{s} + {stride}]\n",
            "vmovdqu64 zmm2, [{s} + 2*{stride}]\n",
            "vmovdqu64 zmm3, [{s} + {three}]\n",
            "lea {s}, [{s} + 4*{stride}]\n",
            "vmovdqa64 [{target} + 256*",
            $at,
            "], zmm0\n",
            "vmovdqa64 [{target} + 256*",
            $at,
            " + 64], zmm1\n",
            "vmovdqa64 [{target} + 256*",
            $at,
            " + 128], zmm2\n",
            "vmovdqa64 [{target} + 256*",
            $at,
            " + 192], zmm3\n",
        )
    };
}

/// Multiplies `$block` by the instruction `$product`, with the instructions that follow each of the four products. The
/// assembly writes only to `c` and `target`, and clobbers what it declares.
macro_rules! multiply {
    ($product:literal, $block:ident: $first:expr, $second:expr, $third:expr, $fourth:expr) => {{
        let block = $block;
        asm!(
            "tileloadd tmm0, [{c} + {line}*1]",
            "tileloadd tmm1, [{c} + {line}*1 + 1024]",
            "tileloadd tmm2, [{c} + {line}*1 + 2048]",
            "tileloadd tmm3, [{c} + {line}*1 + 3072]",
            "2:",
            "mov {s}, {source}",
            "mov {p}, {ahead}",
            "tileloaddt1 tmm4, [{b0} + {line}*1]",
            "tileloadd tmm5, [{a} + {line}*1]",
            "tileloadd tmm6, [{a} + {line}*1 + 1024]",
            concat!($product, " tmm0, tmm5, tmm4"),
            $first,
            "tileloaddt1 tmm7, [{b1} + {line}*1]",
            concat!($product, " tmm1, tmm6, tmm4"),
            $second,
            concat!($product, " tmm2, tmm5, tmm7"),
            $third,
            concat!($product, " tmm3, tmm6, tmm7"),
            $fourth,
            "add {b0}, 1024",
            "add {b1}, 1024",
            "add {a}, 2048",
            "add {target}, 2048",
            "add {source}, 64",
            "add {ahead}, 64",
            "dec {steps:e}",
            "jnz 2b",
            "tilestored [{c} + {line}*1], tmm0",
            "tilestored [{c} + {line}*1 + 1024], tmm1",
            "tilestored [{c} + {line}*1 + 2048], tmm2",
            "tilestored [{c} + {line}*1 + 3072], tmm3",
            "/* {stride} {three} */",
            line = in(reg) 64usize,
            a = inout(reg) block.a => _,
            b0 = inout(reg) block.b[0] => _,
            b1 = inout(reg) block.b[1] => _,
            c = in(reg) block.c,
            steps = inout(reg) block.steps => _,
            source = inout(reg) block.source => _,
            target = inout(reg) block.target => _,
            ahead = inout(reg) block.ahead => _,
            stride = in(reg) block.stride,
            three = in(reg) 3 * block.stride,
            s = out(reg) _,
            p = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _,
            options(nostack),
        );
    }};
}

/// Implements [`Unit`] with the instruction `$product`.
macro_rules! unit {
    ($unit:ident, $product:literal) => {
        impl Unit for $unit {
            #[inline(always)]
            unsafe fn begin() {
                // SAFETY: AMX is available; the configuration is valid.
                unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack)) };
            }

            #[inline(always)]
            unsafe fn end() {
                // SAFETY: AMX is available.
                unsafe { asm!("tilerelease", options(nostack)) };
            }

            #[inline(never)]
            unsafe fn multiply(block: &Block, share: usize) {
                // SAFETY: by this function's contract.
                unsafe {
                    match share {
                        0 => multiply!($product, block: "", "", "", ""),
                        4 => multiply!($product, block: copy_four!("0"), "", "", ""),
                        8 => multiply!($product, block: copy_four!("0"), "", copy_four!("1"), ""),
                        16 => multiply!(
                            $product, block: copy_four!("0"), copy_four!("1"), copy_four!("2"), copy_four!("3")
                        ),
                        _ => multiply!(
                            $product, block:
                            concat!(copy_four!("0"), copy_four!("1")),
                            concat!(copy_four!("2"), copy_four!("3")),
                            concat!(copy_four!("4"), copy_four!("5")),
                            concat!(copy_four!("6"), copy_four!("7"))
                        ),
                    }
                }
            }

            #[inline(always)]
            unsafe fn turn(tile: *const f32, out: *mut f32, rows: usize, count: usize) {
                // SAFETY: by this function's contract; AMX implies AVX-512 F.
                unsafe { super::transpose::turn(tile, out, rows, count) };
            }
        }
    };
}

unit!(Amx, "tdpbf16ps");
unit!(AmxIntegers, "tdpbssd");
