//! The loops over register blocks, which the kernels of single dot products share.

/// Divides the outputs of `$rows` weight rows and `$hidden` hidden rows into blocks. Evaluates `$block` for each, which
/// computes `MR x NR` outputs from weight row `$i` and hidden row `$r` on. The hidden rows that are left take the first
/// shape that fits. The last shape has one hidden row.
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
