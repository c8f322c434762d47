//! The two merges of shard summaries.

use core::fmt;
use flash_sampling_core::backend::{Candidate, Request, Row, RowSummary};
use flash_sampling_core::{Domain, LogprobsMode, RowParams};

/// The merge of the shards' draws into one draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ShardMerge {
    /// The best score wins, then the smaller token: pathwise exact (paper Lemma D.5). Token, score and log Z (from
    /// merged [`MassHistogram`](flash_sampling_core::backend::MassHistogram)s) have the bits of a sampler without shards. The
    /// shards must be pathwise.
    Winners,
    /// A shard is drawn by its log-mass with fresh noise, and its local draw is kept: exact in distribution (paper
    /// Alg. I.4); another number of shards may give another token. The shards may be any exact samplers, planned with
    /// `max_logprobs` so that they know their log-mass. Greedy rows take the winner.
    LogMass,
}

impl fmt::Display for ShardMerge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ShardMerge::Winners => "winners",
            ShardMerge::LogMass => "log-mass",
        })
    }
}

impl ShardMerge {
    /// The parameters with which a shard samples a row.
    pub(crate) fn shard_params<'a>(self, row: &RowParams<'a>) -> RowParams<'a> {
        let needs_mass = self == ShardMerge::LogMass && row.logprobs.is_none();
        if needs_mass { RowParams { logprobs: Some(0), logprobs_mode: LogprobsMode::Processed, ..*row } } else { *row }
    }

    /// Whether a row's shard is drawn by log-mass.
    pub(crate) fn draws_by_mass(self, row: &Row<'_>) -> bool {
        self == ShardMerge::LogMass && !row.greedy
    }
}

/// Merges the summaries of a row, shard by shard. Reuses its memory between rows.
#[derive(Debug, Default)]
pub(crate) struct RowMerger {
    /// The best score of a shard so far, for each draw.
    scores: Vec<f64>,
}

impl RowMerger {
    pub(crate) fn begin(&mut self, row: &Row<'_>, out: &mut RowSummary) {
        self.scores.clear();
        out.begin(row);
    }

    /// Adds the summary of shard number `shard`; shards come in order.
    ///
    /// # Errors
    /// The reason why the summary cannot be used.
    pub(crate) fn add(
        &mut self,
        merge: ShardMerge,
        row: &Row<'_>,
        request: &Request<'_>,
        (shard, summary): (usize, &RowSummary),
        out: &mut RowSummary,
    ) -> Result<(), String> {
        if let Some(error) = summary.error.filter(|error| !error.error.is_bad_logit()) {
            return Err(error.error.to_string());
        }
        out.is_fallback |= summary.is_fallback;
        let is_drawn = request.is_overview() && row.filters.is_none() && summary.error.is_none();
        if is_drawn && !summary.draws.is_empty() {
            check(merge, row, summary)?;
        }
        if is_drawn && merge.draws_by_mass(row) {
            self.draw_shard(row, shard as u32, summary, out);
            out.merge_masses(row, summary);
        } else {
            out.merge(row, request, summary);
        }
        Ok(())
    }

    /// Paper Alg. I.4, lines 3 to 5: the shard with the largest log-mass plus fresh Gumbel noise, ties to the lower
    /// shard, and its local draw.
    fn draw_shard(&mut self, row: &Row<'_>, shard: u32, summary: &RowSummary, out: &mut RowSummary) {
        self.scores.resize(row.draws as usize, f64::NEG_INFINITY);
        out.draws.resize(summary.draws.len().max(out.draws.len()), Candidate::NONE);
        for (i, draw) in summary.draws.iter().enumerate() {
            let noise = row.noise.gumbel(Domain::Shard, row.first_draw + i as u32, shard);
            let score = summary.log_mass.unwrap_or(f64::NEG_INFINITY) + f64::from(noise);
            if score > self.scores[i] {
                self.scores[i] = score;
                out.draws[i] = *draw;
            }
        }
    }
}

/// Checks that the summary of a row without filters has all parts that the merge needs.
fn check(merge: ShardMerge, row: &Row<'_>, summary: &RowSummary) -> Result<(), &'static str> {
    let (found, expected) = (summary.draws.len(), row.draws as usize);
    // A list without replacement may be short: it is then the whole support of the shard.
    let enough = if row.without_replacement { found <= expected } else { found == expected };
    if !enough {
        return Err("it has another number of draws than requested");
    }
    if row.logprobs.is_some() && summary.mass.is_empty() {
        return Err("its mass is missing");
    }
    if merge.draws_by_mass(row) && !summary.log_mass.is_some_and(f64::is_finite) {
        return Err("its log-mass is missing");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::reference::{Reference, ReferenceVariant};
    use flash_sampling_core::{Head, Matrix, PerturbedArgmax, Plan};

    const VOCAB: u32 = 40;

    /// The summaries of shards that begin at `starts`, of a row with log-probabilities.
    fn summaries(row: &Row<'_>, logits: &[f32], starts: &[u32]) -> Vec<RowSummary> {
        let ends = starts[1..].iter().copied().chain([VOCAB]);
        let summarize = |(start, end): (u32, u32)| {
            let mut summary = RowSummary::default();
            summary.of(row, Request::Overview, start, &logits[start as usize..end as usize]);
            summary.log_mass = Some(summary.mass.log_z());
            summary
        };
        starts.iter().copied().zip(ends).map(summarize).collect()
    }

    fn checked(params: &RowParams<'static>) -> Row<'static> {
        let weight = [0.0f32; VOCAB as usize];
        let head = Head::new(Matrix::new(&weight, VOCAB as usize, 1).unwrap()).unwrap();
        let plan = Plan { max_draws: 6, max_logprobs: Some(5), ..Plan::default() };
        let can = Reference::new(head, plan, ReferenceVariant::Tiled).capabilities();
        params.check(&[], &can, &plan, VOCAB).unwrap()
    }

    fn merged(merge: ShardMerge, row: &Row<'_>, summaries: &[RowSummary]) -> Result<RowSummary, String> {
        let (mut merger, mut out) = (RowMerger::default(), RowSummary::default());
        merger.begin(row, &mut out);
        let mut numbered = summaries.iter().enumerate();
        numbered.try_for_each(|shard| merger.add(merge, row, &Request::Overview, shard, &mut out)).map(|()| out)
    }

    #[test]
    fn a_shard_with_all_the_mass_is_always_drawn() {
        let mut logits = [-60.0f32; VOCAB as usize];
        logits[17] = 30.0;
        for seed in 0..50 {
            let row = checked(&RowParams { seed, draws: 4, logprobs: Some(5), ..RowParams::default() });
            let out = merged(ShardMerge::LogMass, &row, &summaries(&row, &logits, &[0, 10, 20])).unwrap();
            assert!(out.draws.len() == 4 && out.draws.iter().all(|draw| draw.winner.token == 17));
        }
    }

    #[test]
    fn a_merge_by_log_mass_draws_shards_as_their_masses_say() {
        // Two shards of masses 1 to 3, and a control with equal ones.
        let heads = |shift: f32| {
            let logits: Vec<f32> = (0..VOCAB).map(|token| if token < 20 { 0.0 } else { shift }).collect();
            let drawn = (0..2000).filter(|&seed| {
                let row = checked(&RowParams { seed, logprobs: Some(0), ..RowParams::default() });
                let out = merged(ShardMerge::LogMass, &row, &summaries(&row, &logits, &[0, 20])).unwrap();
                out.draws[0].winner.token >= 20
            });
            // Deviations from three quarters: five are one in 1.7 million.
            (drawn.count() as f64 - 1500.0) / (2000.0 * 0.75 * 0.25f64).sqrt()
        };
        assert!(heads(3f32.ln()).abs() < 5.0 && heads(0.0).abs() > 5.0);
    }

    #[test]
    fn a_summary_that_lacks_what_the_merge_takes_is_refused() {
        let row = checked(&RowParams { draws: 4, logprobs: Some(5), ..RowParams::default() });
        let good = summaries(&row, &[0.5; VOCAB as usize], &[0, 20]);
        let refused = |damage: fn(&mut RowSummary)| {
            let mut bad = good.clone();
            damage(&mut bad[1]);
            merged(ShardMerge::LogMass, &row, &bad).is_err()
        };
        assert!(!refused(|_| {}));
        assert!(refused(|summary| summary.draws.truncate(3)));
        assert!(refused(|summary| summary.mass.clear()));
        assert!(refused(|summary| summary.log_mass = None));
    }
}
