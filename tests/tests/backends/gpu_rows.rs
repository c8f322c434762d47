//! Rows for the tests of kernels.

use flash_sampling_core::RowParams;

/// Returns rows that differ in all parameters of the kernels.
pub(crate) fn rows(count: usize) -> Vec<RowParams<'static>> {
    const MASK: [u32; 40] = [0xdead_beef; 40];
    let row = |r: usize| {
        let base = RowParams { seed: 7 + r as u64 / 3, position: (1 << 40) + r as u64, ..RowParams::default() };
        match r % 6 {
            0 => base,
            1 => RowParams { temperature: 0.0, ..base },
            2 => RowParams { temperature: 0.6, draws: 3, first_draw: 9, ..base },
            3 => RowParams { logit_bias: &[(1, 4.0), (9, f32::NEG_INFINITY), (60, -1.0)], ..base },
            4 => RowParams { mask: Some(&MASK), draws: 2, ..base },
            _ => RowParams { temperature: 1000.0, ..base },
        }
    };
    (0..count).map(row).collect()
}

/// Returns the rows of [`rows`], without biases if the vocabulary is too small for them.
pub(crate) fn rows_of(count: usize, vocab: usize) -> Vec<RowParams<'static>> {
    let mut rows = rows(count);
    if vocab <= 60 {
        rows.iter_mut().for_each(|row| row.logit_bias = &[]);
    }
    rows
}
