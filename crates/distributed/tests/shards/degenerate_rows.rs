//! Bad logits on any shard, and shards that break their contract.

use crate::common::*;
use flash_sampling_core::backend::Candidate;
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{
    Description, LogprobsMode, Matrix, PerturbedArgmax, RowError, RowParams, SampleError, Samples,
};
use flash_sampling_distributed::{ShardError, ShardMerge, Sharded};

/// Bad logits at both stages, for [`rows_with_bad_logits`]. Some hidden states give bad raw logits of tokens 700 and
/// 960. The raw logits of tokens 3 and 520 are finite, and a transform may make them infinite.
fn weight_with_bad_logits() -> Vec<f32> {
    let mut weight = integers(VOCAB * HIDDEN, 1);
    weight.chunks_exact_mut(HIDDEN).for_each(|row| row[..3].fill(0.0));
    (weight[700 * HIDDEN], weight[3 * HIDDEN + 1]) = (f32::MAX, 3e38);
    (weight[520 * HIDDEN + 1], weight[960 * HIDDEN + 2]) = (3e38, f32::MAX);
    weight
}

/// Every kind of request, five times: without a bad logit, with transformed bad logits, twice with raw bad logits
/// behind transformed ones, and with a raw bad logit alone.
fn rows_with_bad_logits(mask: &[u32]) -> (Vec<f32>, Vec<RowParams<'_>>) {
    let row = RowParams { seed: 3, temperature: 0.01, ..RowParams::default() };
    let ways = [
        row,
        RowParams { draws: 3, logprobs: Some(2), ..row },
        RowParams { top_p: 0.9, ..row },
        RowParams { top_k: 5, kept: true, ..row },
        RowParams { logprobs: Some(2), logprobs_mode: LogprobsMode::Raw, ..row },
        RowParams { top_p: 0.8, logprobs: Some(0), logprobs_mode: LogprobsMode::Raw, ..row },
        RowParams { without_replacement: true, draws: 5, ..row },
        // Masked tokens do not hide a bad raw logit.
        RowParams { mask: Some(mask), ..row },
        RowParams { temperature: 0.0, logit_bias: &[(3, f32::MAX), (520, f32::MAX)], ..row },
    ];
    let kinds = [[0.0f32; 3], [0.0, 1.0, 0.0], [1e6, 1.0, 1e6], [0.0, 1.0, 1e6], [1e6, 0.0, 0.0]];
    let mut all = hidden(ways.len() * kinds.len());
    for (row, kind) in all.chunks_exact_mut(HIDDEN).zip(kinds.iter().cycle()) {
        row[..3].copy_from_slice(kind);
    }
    (all, ways.iter().flat_map(|way| [*way; 5]).collect())
}

#[test]
fn the_error_over_shards_is_that_of_a_sampler_without() {
    let (weight, mask) = (weight_with_bad_logits(), mask_of(&[3, 4, 520, 800]));
    let (head, (hidden, rows)) = (head(&weight), rows_with_bad_logits(&mask));
    let plan = flash_sampling_core::Plan { max_rows: rows.len(), ..PLAN };
    let errors = |samples: &Samples| samples.iter().map(|row| row.err()).collect::<Vec<_>>();
    let want = errors(&sample(&mut *reference(head, plan, ReferenceVariant::Tiled), &hidden, &rows));
    for (r, error) in want.iter().enumerate() {
        let expected = match r % 5 {
            0 => None,
            1 => Some(RowError::PositiveInfinity { token: 3 }),
            3 => Some(RowError::PositiveInfinity { token: 960 }),
            _ => Some(RowError::PositiveInfinity { token: 700 }),
        };
        assert_eq!(*error, expected, "row {r}");
    }
    for world in 1..=8u32 {
        let starts: Vec<u32> = (0..world).map(|k| VOCAB as u32 * k / world).collect();
        let mut sharded = Sharded::new(shards(&head, &starts, plan), ShardMerge::Winners).unwrap();
        assert_eq!(errors(&sample(&mut sharded, &hidden, &rows)), want, "{world} shards");
        let got = samplers(&head, &starts, plan, ShardMerge::Winners, |_, sampler| {
            // A call without bad logits reuses no result of the first call.
            (errors(&sample(sampler, &hidden, &rows)), errors(&sample(sampler, &hidden[..HIDDEN], &rows[..1])))
        });
        assert!(got.iter().all(|got| *got == (want.clone(), vec![None])), "{world} ranks: {got:?}");
    }
    // The negative control: the lowest token with an error on any shard, at any stage.
    let parts = [head.slice(0..500), head.slice(500..1000)];
    let lowest = |r: usize| {
        let (hidden, row) = (&hidden[r * HIDDEN..(r + 1) * HIDDEN], &rows[r..=r]);
        let of = |part: &flash_sampling_core::Head<'_>| {
            errors(&sample(&mut *reference(*part, plan, ReferenceVariant::Tiled), hidden, row))[0]
        };
        parts.iter().find_map(of)
    };
    assert_eq!(lowest(2), Some(RowError::PositiveInfinity { token: 3 }));
    assert_ne!(lowest(2), want[2]);
}

#[test]
fn errors_by_log_mass_are_those_of_a_sampler_without_shards() {
    let (weight, mask) = (weight_with_bad_logits(), mask_of(&[3, 4, 520, 800]));
    let (head, (hidden, rows)) = (head(&weight), rows_with_bad_logits(&mask));
    // Only the first two kinds of request: this merge does not support the others.
    let (hidden, rows) = (&hidden[..10 * HIDDEN], &rows[..10]);
    let errors = |samples: &Samples| samples.iter().map(|row| row.err()).collect::<Vec<_>>();
    let want = errors(&sample(&mut *reference(head, PLAN, ReferenceVariant::Tiled), hidden, rows));
    for starts in [&[0, 400][..], &STARTS] {
        let mut sharded = Sharded::new(shards(&head, starts, PLAN), ShardMerge::LogMass).unwrap();
        assert_eq!(errors(&sample(&mut sharded, hidden, rows)), want, "{starts:?}");
    }
}

/// A shard that breaks its contract: it makes one draw for every request, and omits its mass.
struct Broken<'w>(Box<dyn PerturbedArgmax + 'w>);

impl PerturbedArgmax for Broken<'_> {
    fn description(&self) -> Description {
        self.0.description()
    }

    fn sample(&mut self, _: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let candidate = Candidate {
            winner: flash_sampling_core::backend::Winner::new(1.0, self.0.shape().tokens.start),
            logit: 0.0,
        };
        rows.iter().for_each(|_| out.push_row([candidate], None, &[]));
        Ok(())
    }
}

#[test]
fn an_answer_that_does_not_fit_is_an_error_and_not_a_panic() {
    let head = integer_head();
    for merge in MERGES {
        let mut parts = shards(&head, &[0, 500], PLAN);
        parts[1] = Box::new(Broken(reference(head.slice(500..1000), PLAN, ReferenceVariant::Tiled)));
        let mut sharded = Sharded::new(parts, merge).unwrap();
        let mut call = |row| {
            let hidden = hidden(1);
            let mut out = Samples::new();
            let error = sharded.sample(Matrix::new(&hidden, 1, HIDDEN).unwrap(), &[row], &mut out).unwrap_err();
            assert!(out.is_empty());
            assert!(matches!(source(&error), ShardError::Answer { shard: 1, row: 0, .. }), "{error:?}");
        };
        call(RowParams { draws: 2, ..RowParams::default() });
        call(RowParams { logprobs: Some(1), ..RowParams::default() });
    }
}
