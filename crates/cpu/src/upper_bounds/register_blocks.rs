//! The loops over register blocks, shared by the kernels for AVX2, AVX-512 VNNI and ARM's dot products.

/// Divides the outputs of `$rows` weight rows and `$hidden` hidden rows into register blocks.
///
/// Evaluates `$block` for each register block: `MR` weight rows from `$i` on, by `NR` hidden rows from `$r` on. The
/// shapes `MR x NR` are in descending order of `NR`, and the last `NR` is 1. Each shape takes as many of the remaining
/// hidden rows as possible. Weight rows that do not fill a block of a shape have blocks of one weight row.
macro_rules! register_blocks {
    ($rows:expr, $hidden:expr, $($mr:literal x $nr:literal),+: |$i:ident, $r:ident| $block:expr) => {
        // Weight rows that stay in the second-level cache while all hidden rows are multiplied by them.
        const BLOCK: usize = 32;
        for start in (0..$rows).step_by(BLOCK) {
            let end = $rows.min(start + BLOCK);
            let mut $r = 0;
            $(
                while $hidden - $r >= $nr {
                    const NR: usize = $nr;
                    let mut $i = start;
                    while $i + $mr <= end {
                        const MR: usize = $mr;
                        $block;
                        $i += MR;
                    }
                    while $i < end {
                        const MR: usize = 1;
                        $block;
                        $i += MR;
                    }
                    $r += NR;
                }
            )+
        }
    };
}
pub(super) use register_blocks;
