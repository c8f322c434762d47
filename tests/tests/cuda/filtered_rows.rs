//! Rows with filters that ranks on GPUs decide among themselves.

use flash_sampling_core::{History, RowParams};

/// The rows that have top-p as their only filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TopPRows {
    /// No row.
    None,
    /// All rows with filters; no row has other knobs.
    Bare,
    /// All rows with filters; some rows have masks, biases and penalties.
    Knobs,
    /// All rows with filters; a few rows have a bias of one token, which is on one rank's shard.
    Bias,
}

/// Returns the sequence of rows with penalties, with tokens on all shards. Only the repetition penalty uses its prompt.
pub(crate) fn histories() -> &'static [History] {
    let mut history = History::new(&[5, 9, 3000, 5999]);
    history.extend([7, 5, 2600, 4100, 5998, 5]);
    Box::leak(Box::new([history]))
}

/// Returns rows of every kind that ranks on GPUs decide among themselves, and no other rows.
pub(crate) fn rows(count: usize, by_mass: TopPRows, lists: &'static [History]) -> Vec<RowParams<'static>> {
    const MASK: [u32; 188] = [0xfff0_ff0f; 188];
    let row = |r: usize| {
        let of_mass =
            |base| RowParams { top_p: [0.95, 0.5, 0.05, 1.0][r % 4], temperature: [1.0, 0.4][r / 4 % 2], ..base };
        let base = RowParams { seed: 7 + r as u64 / 3, position: r as u64, ..RowParams::default() };
        match r % 8 {
            _ if by_mass == TopPRows::Bare => of_mass(base),
            1 | 6 if by_mass == TopPRows::Knobs => RowParams { mask: Some(&MASK), ..of_mass(base) },
            2 | 5 if by_mass == TopPRows::Knobs => {
                RowParams { history: Some(&lists[0]), presence_penalty: 1.5, logit_bias: &[(7, 3.0)], ..of_mass(base) }
            }
            4 if by_mass == TopPRows::Knobs => {
                RowParams { history: Some(&lists[0]), repetition_penalty: 1.3, ..of_mass(base) }
            }
            1 if by_mass == TopPRows::Bias => RowParams { logit_bias: &[(7, 3.0)], ..of_mass(base) },
            _ if by_mass == TopPRows::Knobs || by_mass == TopPRows::Bias => of_mass(base),
            0 => RowParams { top_k: 20, ..base },
            1 => RowParams { min_p: 0.1, ..base },
            2 => RowParams { top_k: 50, top_p: 0.9, draws: 3, ..base },
            3 => RowParams { temperature: 0.0, ..base },
            4 => RowParams { top_k: 1, mask: Some(&MASK), ..base },
            5 => RowParams {
                history: Some(&lists[0]),
                presence_penalty: 1.5,
                top_k: 100,
                min_p: 0.01,
                temperature: 0.3,
                ..base
            },
            6 => base,
            _ => RowParams { top_p: 0.8, min_p: 0.3, temperature: 2.0, ..base },
        }
    };
    (0..count).map(row).collect()
}
