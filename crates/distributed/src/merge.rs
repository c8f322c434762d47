//! The two merges of shard summaries.

use crate::error::ShardError;
use crate::filtered::OpenRows;
use crate::rows::Checked;
use crate::stage::First;
use crate::summary::ShardSummary;
use crate::tiling::Whole;
use core::fmt;
use flash_sampling_core::params::Row;
use flash_sampling_core::{
    Candidate, Domain, Draw, LogprobsMode, MassHistogram, RowError, RowParams, RowSample, Samples, Stage, TopList,
    Winner,
};

/// How the draws of shards become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ShardMerge {
    /// The best score wins, then the smaller token: pathwise exact (paper Lemma D.5). The token, its score and, by the
    /// [`MassHistogram`] merge, log Z have the very bits of a sampler without shards. The shards must be pathwise.
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
    /// What a shard is asked for a row.
    pub(crate) fn asks<'a>(self, row: &RowParams<'a>) -> RowParams<'a> {
        let needs_mass = self == ShardMerge::LogMass && row.logprobs.is_none();
        if needs_mass { RowParams { logprobs: Some(0), logprobs_mode: LogprobsMode::Processed, ..*row } } else { *row }
    }

    /// Whether a row's shard is drawn by log-mass.
    pub(crate) fn draws_by_mass(self, row: &Row<'_>) -> bool {
        self == ShardMerge::LogMass && !row.greedy
    }
}

/// Merges summaries; keeps its memory from call to call.
#[derive(Debug, Default)]
pub(crate) struct Merger {
    draws: Vec<Candidate>,
    list: TopList,
    top: TopList,
    mass: MassHistogram,
}

impl Merger {
    /// Merges a whole call. `told(shard, row)`, a summary and the stage of its bad logit, is asked only for rows whose
    /// parameters are valid and that have no filters; those that have are in `filtered`.
    pub(crate) fn rows<'a>(
        &mut self,
        whole: &Whole,
        rows: &[Checked<'_>],
        shards: usize,
        told: impl Fn(usize, usize) -> (ShardSummary<'a>, Stage),
        filtered: &OpenRows,
        out: &mut Samples,
    ) -> Result<(), ShardError> {
        out.clear();
        for (r, row) in rows.iter().enumerate() {
            match row {
                Err(error) => out.push_error(*error),
                Ok(row) if row.filters.is_some() => filtered.emit(r, whole.shape.vocab_size, out),
                Ok(row) => {
                    let merged = self.row(whole.merge, row, shards, |shard| told(shard, r), out);
                    if let Err((shard, reason)) = merged {
                        out.clear();
                        return Err(ShardError::Answer { shard, row: r, reason });
                    }
                }
            }
        }
        Ok(())
    }

    /// Merges one row. The error is a shard whose answer cannot be used.
    fn row<'a>(
        &mut self,
        merge: ShardMerge,
        row: &Row<'_>,
        shards: usize,
        told: impl Fn(usize) -> (ShardSummary<'a>, Stage),
        out: &mut Samples,
    ) -> Result<(), (usize, String)> {
        let mut invalid = First::default();
        let mut has_mass = false;
        for shard in 0..shards {
            let (summary, stage) = told(shard);
            match summary {
                Ok(sample) => {
                    fits(merge, row, &sample).map_err(|reason| (shard, reason.to_owned()))?;
                    has_mass = true;
                }
                Err(RowError::NoFiniteLogit) => {}
                Err(error) if error.is_bad_logit() => invalid.add(stage, error),
                Err(error) => return Err((shard, error.to_string())),
            }
        }
        if let Some(error) = invalid.error() {
            out.push_error(error);
            return Ok(());
        }
        if !has_mass {
            out.push_error(RowError::NoFiniteLogit);
            return Ok(());
        }
        let samples = || (0..shards).filter_map(|shard| Some((shard as u32, told(shard).0.ok()?)));
        self.draws.clear();
        if merge.draws_by_mass(row) {
            self.draws.extend((0..row.draws).map(|i| by_mass(row, i, samples())));
        } else if row.without_replacement {
            self.list.reset(row.draws as usize, 0.0);
            samples().flat_map(|(_, s)| s.draws).for_each(|draw| self.list.push(candidate(draw)));
            let found = self.list.as_slice();
            if found.len() < row.draws as usize {
                out.push_error(RowError::SupportTooSmall { draws: row.draws, available: found.len() as u32 });
                return Ok(());
            }
            self.draws.extend_from_slice(found);
        } else {
            self.draws.extend((0..row.draws).map(|i| winner(i, samples())));
        }
        self.mass.clear();
        self.top.reset(row.logprobs.unwrap_or(0) as usize, 0.0);
        if row.logprobs.is_some() {
            for (_, sample) in samples() {
                sample.mass.into_iter().for_each(|mass| self.mass.merge(mass));
                sample.top.iter().for_each(|&c| self.top.push(c));
            }
        }
        let mass = row.logprobs.is_some().then_some(&self.mass);
        out.push_row(self.draws.iter().copied(), mass, self.top.as_slice());
        Ok(())
    }
}

/// Paper Lemma D.5 for draw `first_draw + i`: the best score of all shards.
fn winner<'a>(i: u32, samples: impl Iterator<Item = (u32, RowSample<'a>)>) -> Candidate {
    samples.map(|(_, sample)| candidate(&sample.draws[i as usize])).fold(Candidate::NONE, Candidate::merge)
}

/// Paper Alg. I.4, lines 3 to 5, for draw `first_draw + i`: the shard with the largest log-mass plus fresh Gumbel noise,
/// ties to the lower shard, and its local draw.
fn by_mass<'a>(row: &Row<'_>, i: u32, samples: impl Iterator<Item = (u32, RowSample<'a>)>) -> Candidate {
    let mut best = (f64::NEG_INFINITY, Candidate::NONE);
    for (shard, sample) in samples {
        let noise = row.noise.gumbel(Domain::Shard, row.first_draw + i, shard);
        let score = sample.log_z.unwrap_or(f64::NEG_INFINITY) + f64::from(noise);
        if score > best.0 {
            best = (score, candidate(&sample.draws[i as usize]));
        }
    }
    best.1
}

/// Whether an answer has what the merge takes from it.
fn fits(merge: ShardMerge, row: &Row<'_>, sample: &RowSample<'_>) -> Result<(), &'static str> {
    let (found, asked) = (sample.draws.len(), row.draws as usize);
    // A list without replacement may be short: then it is all that the shard has.
    let enough = if row.without_replacement { (1..=asked).contains(&found) } else { found == asked };
    if !enough {
        return Err("it has another number of draws than asked for");
    }
    if row.logprobs.is_some() && sample.mass.is_none() {
        return Err("its mass is missing");
    }
    if merge.draws_by_mass(row) && !sample.log_z.is_some_and(f64::is_finite) {
        return Err("its log-mass is missing");
    }
    Ok(())
}

fn candidate(draw: &Draw) -> Candidate {
    Candidate { winner: Winner::new(draw.score, draw.token), logit: draw.logit }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::reference::{Reference, Scheme};
    use flash_sampling_core::{Capabilities, Exactness, Head, Input, Matrix, PerturbedArgmax, Plan, Shape, Variant};
    use proptest::prelude::*;

    const VOCAB: u32 = 40;

    fn whole(merge: ShardMerge) -> Whole {
        let plan = Plan { max_rows: 4, max_draws: 6, max_logprobs: Some(5), canonical: false };
        let capabilities = Capabilities {
            backend: "test",
            variant: Variant::Sharded,
            exactness: Exactness::Pathwise,
            input: Input::Hidden,
            without_replacement: true,
            knobs: flash_sampling_core::Knobs::NONE,
            canonical: false,
        };
        let shape = Shape { tokens: 0..VOCAB, vocab_size: VOCAB, input: 1 };
        Whole { shape, plan, shards_plan: plan, capabilities, merge }
    }

    /// Three rows: plain draws, a list without replacement, greedy.
    fn rows() -> [RowParams<'static>; 3] {
        let row = RowParams { seed: 3, draws: 4, logprobs: Some(5), ..RowParams::default() };
        [row, RowParams { without_replacement: true, draws: 6, ..row }, RowParams { temperature: 0.0, draws: 1, ..row }]
    }

    /// The answers of shards that begin at `starts`, over the given logits.
    fn answers(logits: &[f32], starts: &[u32]) -> Vec<Samples> {
        let head = Head::new(Matrix::new(logits, logits.len(), 1).unwrap()).unwrap();
        let plan = whole(ShardMerge::Winners).plan;
        let answer = |shard: Head<'_>| {
            let mut out = Samples::new();
            let input = Matrix::new(&[1f32; 3], 3, 1).unwrap();
            // A shard is never asked for more than it has: `Shard::ask` sees to that.
            let rows = rows().map(|row| RowParams { draws: row.draws.min(shard.tokens().len().max(1) as u32), ..row });
            Reference::new(shard, plan, Scheme::Tiled).sample(input, &rows, &mut out).unwrap();
            out
        };
        head.split(starts).into_iter().map(answer).collect()
    }

    type Merged = Vec<(Vec<Draw>, Option<f64>, Vec<Candidate>, MassHistogram)>;

    fn merged(answers: &[&Samples]) -> Merged {
        let mut out = Samples::new();
        // Only the rows that every shard could answer in full, and the list.
        let whole = whole(ShardMerge::Winners);
        let told = |shard: usize, row: usize| (answers[shard].row(row), Stage::default());
        let rows = rows().map(|row| whole.check(&row));
        Merger::default().rows(&whole, &rows, answers.len(), told, &OpenRows::default(), &mut out).unwrap();
        let row = |r: Result<RowSample<'_>, RowError>| {
            let r = r.unwrap();
            (r.draws.to_vec(), r.log_z, r.top.to_vec(), r.mass.unwrap().clone())
        };
        out.iter().map(row).collect()
    }

    proptest! {
        #[test]
        fn winners_do_not_depend_on_the_order_or_the_cut(
            logits in prop::collection::vec(-8i8..8, VOCAB as usize),
            cut in prop::collection::btree_set(1u32..VOCAB / 4, 0..4),
            rotate in 0usize..5,
        ) {
            let logits: Vec<f32> = logits.into_iter().map(|l| f32::from(l) * 0.5).collect();
            let starts: Vec<u32> = [0].into_iter().chain(cut.into_iter().map(|c| c * 4)).collect();
            let shards = answers(&logits, &starts);
            let mut order: Vec<&Samples> = shards.iter().collect();
            let n = rotate % order.len();
            order.rotate_left(n);
            let unsharded = answers(&logits, &[0]);
            prop_assert_eq!(merged(&order), merged(&[&unsharded[0]]));
            // Idempotent in the draws: hearing a shard twice changes nothing.
            let twice: Vec<&Samples> = order.iter().chain(&order[..1]).copied().collect();
            for (a, b) in merged(&twice).iter().zip(&merged(&order)) {
                prop_assert_eq!(&a.0, &b.0);
                prop_assert_eq!(&a.2, &b.2);
            }
        }
    }

    #[test]
    fn a_shard_with_all_the_mass_is_always_drawn() {
        let mut logits = [-60.0f32; VOCAB as usize];
        logits[17] = 30.0;
        let shards = answers(&logits, &[0, 10, 20]);
        let mut out = Samples::new();
        let [row, _, greedy] = rows();
        let whole = whole(ShardMerge::LogMass);
        let told = |shard: usize, row: usize| (shards[shard].row(2 * row), Stage::default());
        let rows = [row, greedy].map(|row| whole.check(&row));
        Merger::default().rows(&whole, &rows, 3, told, &OpenRows::default(), &mut out).unwrap();
        for row in out.iter() {
            assert!(row.unwrap().draws.iter().all(|d| d.token == 17));
        }
    }
}
