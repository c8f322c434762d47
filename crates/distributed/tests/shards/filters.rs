//! Filters over shards: every bit of a sampler without shards in any world, and the cutoff of the whole row.

use crate::common::*;
use flash_sampling_core::backend::{Batch, Request, RowSummary, Scan};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{
    Description, Draw, Head, History, Knob, Knobs, LogprobsMode, Matrix, Order, PerturbedArgmax, Plan, RowError,
    RowParams, SampleError, Samples,
};
use flash_sampling_distributed::{ShardMerge, Sharded};

const PLAN: Plan = Plan { max_rows: 64, max_draws: 12, max_logprobs: Some(6), canonical: false };

/// Rows with every filter, single and combined, among plain, greedy and bad rows.
fn filtered_rows<'a>(mask: &'a [u32], none: &'a [u32], history: &'a History) -> Vec<RowParams<'a>> {
    let row = RowParams { seed: 5, position: 9, temperature: 0.9, ..RowParams::default() };
    let past = RowParams { history: Some(history), repetition_penalty: 1.3, presence_penalty: 0.5, ..row };
    let raw = RowParams { logprobs: Some(6), logprobs_mode: LogprobsMode::Raw, ..row };
    vec![
        RowParams { top_p: 0.9, ..row },
        row,
        RowParams { top_k: 5, ..row },
        RowParams { min_p: 0.2, draws: 3, ..row },
        RowParams { top_k: 50, top_p: 0.7, logprobs: Some(6), ..row },
        RowParams { temperature: 0.0, top_k: 3, logprobs: Some(2), ..row },
        RowParams { top_n_sigma: 1.5, ..row },
        RowParams { epsilon_cutoff: 0.004, ..row },
        RowParams { typical_p: 0.5, ..row },
        RowParams { xtc_threshold: 0.01, xtc_probability: 1.0, ..row },
        RowParams { top_p: 0.999, temperature: 30.0, draws: 2, kept: true, ..row },
        RowParams { top_p: 0.6, temperature: 30.0, ..row },
        RowParams { top_p: 0.8, temperature: 3.0, draws: 9, first_draw: 2, ..row },
        RowParams { min_p: 0.01, top_k: 300, top_p: 0.95, order: Order::LlamaCpp, kept: true, ..row },
        RowParams { top_k: 8, top_p: 0.9, order: Order::HuggingFace, ..row },
        RowParams { top_p: 0.9, kept: true, logprobs: Some(0), ..past },
        RowParams { top_k: 4, mask: Some(mask), kept: true, ..row },
        RowParams { top_p: 0.5, mask: Some(none), ..row },
        RowParams { top_k: 6, without_replacement: true, draws: 6, ..row },
        RowParams { top_k: 6, without_replacement: true, draws: 7, ..row },
        RowParams { kept: true, ..row },
        RowParams { top_p: f32::NAN, ..row },
        RowParams { without_replacement: true, draws: 12, ..row },
        RowParams { draws: 4, ..raw },
        RowParams { temperature: 0.0, ..raw },
        RowParams { mask: Some(mask), logit_bias: &[(2, 3.0)], logprobs: Some(0), ..raw },
        RowParams { mask: Some(none), ..raw },
        RowParams { top_p: 0.9, draws: 2, kept: true, ..raw },
        RowParams { typical_p: 0.6, ..raw },
        RowParams { without_replacement: true, draws: 12, ..raw },
        RowParams { top_p: 0.9, min_tokens: 9, stop_token_ids: &[3, 950], banned: &[7, 999], ..past },
    ]
}

/// All results of a row, with its kept tokens, raw logits and passes.
type Filtered = Result<(Row, Option<(u32, u64, Vec<u32>)>, Vec<u32>, u32), RowError>;

fn whole(samples: &Samples) -> Vec<Filtered> {
    let rows = all(samples).into_iter().zip(samples.iter());
    rows.map(|(row, sample)| {
        let sample = sample?;
        let kept = sample.kept.map(|k| (k.count, k.log_mass.to_bits(), k.tokens.to_vec()));
        let raw = sample.raw_logits.iter().map(|logit| logit.to_bits()).collect();
        Ok((row, kept, raw, sample.passes))
    })
    .collect()
}

/// Starts of `world` unequal shards. Every fifth shard is empty: it begins at the start of the next.
fn cuts(world: u32) -> Vec<u32> {
    let start = |k: u32| (VOCAB as u32 * k / world) / 3 * 3;
    (0..world).map(|k| start(if k % 5 == 4 { (k + 1).min(world - 1) } else { k })).collect()
}

fn case<R>(run: impl FnOnce(&Head<'_>, &[f32], &[RowParams<'_>]) -> R) -> R {
    let (mask, none, history) = (mask_of(&[2, 3, 500, 501, 999]), mask_of(&[]), History::new(&[1, 2, 500, 998]));
    let rows = filtered_rows(&mask, &none, &history);
    run(&integer_head(), &hidden(rows.len()), &rows)
}

#[test]
fn filters_give_every_bit_of_the_unsharded_sampler() {
    case(|head, hidden, rows| {
        // The wanted result: one shard, which makes the same passes. Its draws are equal to those of the reference.
        let mut want = Sharded::new(shards(head, &[0], PLAN), ShardMerge::Winners).unwrap();
        let mut reference = reference(*head, PLAN, ReferenceVariant::Tiled);
        for position in [0, 1_000_000] {
            let rows: Vec<_> = rows.iter().map(|row| RowParams { position, ..*row }).collect();
            let want = sample(&mut want, hidden, &rows);
            let of_reference = sample(&mut *reference, hidden, &rows);
            assert_eq!(all(&want), all(&of_reference));
            let want = whole(&want);
            assert!(want.iter().flatten().any(|row| row.3 > 1), "no row takes a second pass");
            for (r, (row, reference)) in want.iter().zip(of_reference.iter()).enumerate() {
                let (Ok((_, kept, raw, _)), Ok(reference)) = (row, reference) else { continue };
                let of_reference: Vec<_> = reference.raw_logits.iter().map(|logit| logit.to_bits()).collect();
                assert_eq!(*raw, of_reference, "row {r}");
                let (count, tokens) = reference.kept.map(|k| (k.count, k.tokens.to_vec())).unzip();
                assert_eq!(kept.clone().map(|k| (k.0, k.2)).unzip(), (count, tokens), "row {r}");
            }
            for starts in [cuts(1), cuts(2), cuts(3), cuts(7), cuts(64), STARTS.to_vec()] {
                let mut sharded = Sharded::new(shards(head, &starts, PLAN), ShardMerge::Winners).unwrap();
                assert_eq!(whole(&sample(&mut sharded, hidden, &rows)), want, "shards at {starts:?}");
            }
        }
    });
}

/// Runs a rank in a thread for each shard; returns the results of two calls of each rank.
fn by_ranks(starts: &[u32]) -> Vec<Vec<Vec<Filtered>>> {
    case(|head, hidden, rows| {
        samplers(head, starts, PLAN, ShardMerge::Winners, |_, sampler| {
            let few = &hidden[..3 * HIDDEN];
            vec![whole(&sample(sampler, hidden, rows)), whole(&sample(sampler, few, &rows[..3]))]
        })
    })
}

#[test]
fn every_rank_filters_as_one_sampler_does() {
    let want = by_ranks(&[0]).remove(0);
    for world in [2, 3, 7, 64] {
        for (rank, got) in by_ranks(&cuts(world)).into_iter().enumerate() {
            assert_eq!(got, want, "rank {rank} of {world}");
        }
    }
}

/// A shard that breaks its contract: its summaries have only the tokens that its own cutoff keeps.
struct CutsAlone<'s>(Box<dyn PerturbedArgmax + 's>);

impl PerturbedArgmax for CutsAlone<'_> {
    fn description(&self) -> Description {
        self.0.description()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        self.0.sample(input, rows, out)
    }

    fn scan(&mut self) -> Option<&mut dyn Scan> {
        Some(self)
    }
}

impl Scan for CutsAlone<'_> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        let (input, rows) = (batch.input, batch.params);
        let mut kept = Samples::new();
        let asking: Vec<_> = rows.iter().map(|row| RowParams { kept: row.temperature > 0.0, ..*row }).collect();
        self.0.sample(input, &asking, &mut kept)?;
        self.0.scan().unwrap().scan(batch, requests, out)?;
        // Only the tokens above the shard's own cutoff stay in the summary.
        for (r, survey) in out.iter_mut().enumerate().filter(|(r, _)| *r < rows.len() && requests[*r] != Request::Skip)
        {
            let Ok(Some(kept)) = kept.row(r).map(|row| row.kept) else { continue };
            survey.list.retain(|c| kept.tokens[c.winner.token as usize / 32] >> (c.winner.token % 32) & 1 == 1);
            survey.mass.clear();
            survey.list.iter().for_each(|c| survey.mass.push(c.logit));
        }
        Ok(())
    }
}

#[test]
fn a_shard_that_filters_by_its_own_threshold_is_detected() {
    let head = integer_head();
    let hidden = hidden(1);
    let row = RowParams { seed: 5, top_p: 0.5, kept: true, temperature: 2.0, ..RowParams::default() };
    let kept = |shards: Vec<Box<dyn PerturbedArgmax + '_>>| {
        let mut sharded = Sharded::new(shards, ShardMerge::Winners).unwrap();
        let out = sample(&mut sharded, &hidden, &[row]);
        let kept = out.row(0).unwrap().kept.unwrap();
        (kept.count, kept.log_mass)
    };
    let want = kept(shards(&head, &[0], PLAN));
    assert_eq!(kept(shards(&head, &[0, 500], PLAN)), want);
    let alone = |s| Box::new(CutsAlone(s)) as Box<dyn PerturbedArgmax + '_>;
    let cut = kept(shards(&head, &[0, 500], PLAN).into_iter().map(alone).collect());
    assert!(cut.0 < want.0, "{cut:?} against {want:?}");
}

#[test]
fn what_cannot_be_merged_is_refused_by_name() {
    let head = integer_head();
    let rows = [
        RowParams { top_p: 0.5, ..RowParams::default() },
        RowParams { kept: true, ..RowParams::default() },
        RowParams { banned: &[3], ..RowParams::default() },
        RowParams { logprobs: Some(1), logprobs_mode: LogprobsMode::Raw, ..RowParams::default() },
    ];
    let refused = |mut sharded: Sharded<'_>| {
        assert!(sharded.capabilities().knobs.intersection(Knobs::FILTERS).is_empty());
        let out = sample(&mut sharded, &hidden(4), &rows);
        let refusal = |r: usize| out.row(r).map(|row| row.draws.first().map(|d: &Draw| d.token)).err();
        let unsupported = |knob| Some(RowError::Unsupported { knob, alternative: "a merge of shards by winners" });
        assert_eq!(refusal(0), unsupported(Knob::TopP));
        assert_eq!(refusal(1), unsupported(Knob::Kept));
        assert_eq!(refusal(2), None);
        assert_eq!(refusal(3), unsupported(Knob::LogprobsMode));
    };
    refused(Sharded::new(shards(&head, &STARTS, PLAN), ShardMerge::LogMass).unwrap());
    // Shards without a scan: grouped samplers.
    let grouped = head.split(&[0, 500]).into_iter().map(|shard| reference(shard, PLAN, ReferenceVariant::Grouped(64)));
    refused(Sharded::new(grouped.collect(), ShardMerge::LogMass).unwrap());
}
