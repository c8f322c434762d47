//! Digests of a row's parameters, which ranks compare.

use super::RowParams;
use crate::backend::digest::{of_list, of_words};

/// Number of groups of parameters.
const COUNT: usize = 11;

impl RowParams<'_> {
    /// For implementers: the names of the groups of [`RowParams::digests`], for errors. Groups of several fields:
    ///
    /// * `draws`: `draws`, `first_draw`, `without_replacement`
    /// * `log-probabilities and kept tokens`: `logprobs`, `logprobs_mode`,
    ///   `logprob_token_ids`, `ranks`, `kept`
    /// * `filters`: `top_k`, `top_p`, `min_p`, `top_n_sigma`, `epsilon_cutoff`, `typical_p`, `xtc_threshold`,
    ///   `xtc_probability`, `order`
    /// * `penalties`: `repetition_penalty`, `frequency_penalty`, `presence_penalty`, and the fields `dry_*`
    /// * `bans and stops`: `banned`, `stop_token_ids`, `min_tokens`
    pub const GROUPS: [&'static str; COUNT] = [
        "seed",
        "position",
        "draws",
        "log-probabilities and kept tokens",
        "temperature",
        "filters",
        "penalties",
        "history",
        "mask",
        "logit bias",
        "bans and stops",
    ];

    /// For implementers: a digest of every parameter and of the contents of the lists.
    ///
    /// Rows with equal digests draw the same tokens from the same logits, except for 1 in 2^64 pairs of rows. A
    /// [`History`](crate::History) keeps its digest; a mask costs about a microsecond for 10^5 tokens.
    pub fn digest(&self) -> u64 {
        of_words(self.digests())
    }

    /// For implementers: one digest per group of [`RowParams::GROUPS`]. A parameter changes its group's digest.
    pub fn digests(&self) -> [u64; COUNT] {
        // The pattern names every field, so a new field fails to compile here.
        let RowParams {
            seed,
            position,
            temperature,
            draws,
            first_draw,
            without_replacement,
            kept,
            logprobs,
            logprobs_mode,
            logprob_token_ids,
            ranks,
            mask,
            logit_bias,
            banned,
            stop_token_ids,
            min_tokens,
            history,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            dry_multiplier,
            dry_base,
            dry_allowed_length,
            dry_penalty_last_n,
            dry_sequence_breakers,
            top_k,
            top_p,
            min_p,
            top_n_sigma,
            epsilon_cutoff,
            typical_p,
            xtc_threshold,
            xtc_probability,
            order,
        } = *self;
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let floats = |high: f32, low: f32| pair(high.to_bits(), low.to_bits());
        [
            seed,
            position,
            of_words([pair(draws, first_draw), u64::from(without_replacement)]),
            of_words([
                logprobs.map_or(u64::MAX, u64::from),
                logprobs_mode as u64,
                pair(ranks.into(), kept.into()),
                of_list(logprob_token_ids),
            ]),
            u64::from(temperature.to_bits()),
            of_words([
                pair(top_k, order as u32),
                floats(top_p, min_p),
                floats(top_n_sigma, epsilon_cutoff),
                floats(xtc_threshold, xtc_probability),
                u64::from(typical_p.to_bits()),
            ]),
            of_words([
                floats(repetition_penalty, 0.0),
                floats(frequency_penalty, presence_penalty),
                floats(dry_multiplier, dry_base),
                pair(dry_allowed_length, dry_penalty_last_n),
                of_list(dry_sequence_breakers),
            ]),
            history.map_or(0, |history| history.digest()),
            mask.map_or(0, of_list),
            of_words(logit_bias.iter().map(|&(token, bias)| pair(token, bias.to_bits()))),
            of_words([of_list(banned), of_list(stop_token_ids), u64::from(min_tokens)]),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{History, LogprobsMode, Order};
    use std::collections::HashSet;

    #[test]
    fn every_parameter_counts_and_what_is_in_the_lists() {
        let row = RowParams::default();
        let histories: Vec<History> = [(&[1, 2][..], &[3][..]), (&[1, 2], &[4]), (&[1], &[2, 3]), (&[], &[])]
            .map(|(prompt, output)| {
                let mut history = History::new(prompt);
                history.extend(output.iter().copied());
                history
            })
            .into();
        let mut rows = vec![
            row,
            RowParams { seed: 1, ..row },
            RowParams { position: 1, ..row },
            RowParams { temperature: 0.5, ..row },
            RowParams { draws: 2, ..row },
            RowParams { first_draw: 1, ..row },
            RowParams { without_replacement: true, ..row },
            RowParams { kept: true, ..row },
            RowParams { logprobs: Some(0), ..row },
            RowParams { logprobs_mode: LogprobsMode::Raw, ..row },
            RowParams { logprob_token_ids: &[1], ..row },
            RowParams { logprob_token_ids: &[2], ..row },
            RowParams { ranks: true, ..row },
            RowParams { top_k: 1, ..row },
            RowParams { top_p: 0.5, ..row },
            RowParams { min_p: 0.5, ..row },
            RowParams { top_n_sigma: 0.5, ..row },
            RowParams { epsilon_cutoff: 0.5, ..row },
            RowParams { typical_p: 0.5, ..row },
            RowParams { xtc_threshold: 0.5, ..row },
            RowParams { xtc_probability: 0.5, ..row },
            RowParams { order: Order::LlamaCpp, ..row },
            RowParams { repetition_penalty: 0.5, ..row },
            RowParams { frequency_penalty: 0.5, ..row },
            RowParams { presence_penalty: 0.5, ..row },
            RowParams { dry_multiplier: 0.5, ..row },
            RowParams { dry_base: 0.5, ..row },
            RowParams { dry_allowed_length: 1, ..row },
            RowParams { dry_penalty_last_n: 1, ..row },
            RowParams { min_tokens: 1, ..row },
            RowParams { mask: Some(&[1, 2]), ..row },
            RowParams { mask: Some(&[1, 3]), ..row },
            RowParams { logit_bias: &[(1, 0.5)], ..row },
            RowParams { logit_bias: &[(2, 0.5)], ..row },
            RowParams { logit_bias: &[(1, 0.25)], ..row },
            RowParams { banned: &[1], ..row },
            RowParams { banned: &[2], ..row },
            RowParams { stop_token_ids: &[1], ..row },
            RowParams { dry_sequence_breakers: &[1], ..row },
        ];
        rows.extend(histories.iter().map(|history| RowParams { history: Some(history), ..row }));
        // Each row differs in one parameter, so in one group.
        for other in &rows[1..] {
            let differ = row.digests().iter().zip(other.digests()).filter(|(a, b)| **a != *b).count();
            assert_eq!(differ, 1, "{other:?}");
        }
        let digests: HashSet<u64> = rows.iter().map(RowParams::digest).collect();
        assert_eq!(digests.len(), rows.len());
        assert_eq!(RowParams { history: Some(&histories[0].clone()), ..row }.digest(), rows[rows.len() - 4].digest());
    }
}
