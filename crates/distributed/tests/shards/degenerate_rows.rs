//! Bad logits on any shard, shards without mass, and shards that do not keep their promises.

use crate::common::*;
use core::error::Error;
use flash_sampling_core::reference::Scheme;
use flash_sampling_core::{
    Candidate, Capabilities, Matrix, PerturbedArgmax, RowError, RowParams, SampleError, Samples, Shape,
};
use flash_sampling_distributed::{ShardError, ShardMerge, Sharded};

const MERGES: [ShardMerge; 2] = [ShardMerge::Winners, ShardMerge::LogMass];

#[test]
fn the_lowest_bad_token_of_all_shards_is_named_and_the_other_rows_stay() {
    // Token 700 has a NaN that only row 1 can see, token 950 an infinity; token 2 an infinity that only row 2 sees.
    let mut weight = integers(VOCAB * HIDDEN, 1);
    let mut hidden = hidden(4);
    for row in 0..4 {
        hidden[row * HIDDEN..row * HIDDEN + 3].fill(0.0);
    }
    hidden[HIDDEN] = 1.0;
    hidden[HIDDEN + 1] = 1.0;
    hidden[2 * HIDDEN + 2] = 1.0;
    for token in 0..VOCAB {
        weight[token * HIDDEN..token * HIDDEN + 3].fill(0.0);
    }
    let clean = weight.clone();
    // 0 x infinity would be NaN in every row: large finite values overflow only where the hidden state is not 0.
    weight[950 * HIDDEN + 1] = f32::MAX;
    weight[700 * HIDDEN] = f32::MAX;
    weight[2 * HIDDEN + 2] = f32::MAX;
    let big = 1e6;
    for (row, column) in [(1, 0), (1, 1), (2, 2)] {
        hidden[row * HIDDEN + column] = big;
    }
    let rows = [RowParams { logprobs: Some(3), ..RowParams::default() }; 4];
    for merge in MERGES {
        let mut sharded = Sharded::new(shards(&head(&weight), &STARTS, PLAN), merge).unwrap();
        let mut untouched = Sharded::new(shards(&head(&clean), &STARTS, PLAN), merge).unwrap();
        let got = all(&sample(&mut sharded, &hidden, &rows));
        let want = all(&sample(&mut untouched, &hidden, &rows));
        assert_eq!(got[0], want[0]);
        assert_eq!(got[1], Err(RowError::PositiveInfinity { token: 700 }));
        assert_eq!(got[2], Err(RowError::PositiveInfinity { token: 2 }));
        assert_eq!(got[3], want[3]);
    }
}

#[test]
fn a_nan_anywhere_is_the_rows_error() {
    let weight = integers(VOCAB * HIDDEN, 1);
    let mut hidden = hidden(2);
    hidden[HIDDEN + 5] = f32::NAN;
    for merge in MERGES {
        let mut sharded = Sharded::new(shards(&head(&weight), &STARTS, PLAN), merge).unwrap();
        let got = sample(&mut sharded, &hidden, &[RowParams::default(); 2]);
        assert!(got.row(0).is_ok());
        assert_eq!(got.row(1).unwrap_err(), RowError::NaN { token: 0 });
    }
}

#[test]
fn a_shard_without_mass_is_no_error_unless_all_are() {
    let weight = integers(VOCAB * HIDDEN, 1);
    let (some, none) = (mask_of(&[510, 511]), mask_of(&[]));
    let row = RowParams { draws: 12, ..RowParams::default() };
    let rows = [RowParams { mask: Some(&some), ..row }, RowParams { mask: Some(&none), ..row }];
    for merge in MERGES {
        let mut sharded = Sharded::new(shards(&head(&weight), &STARTS, PLAN), merge).unwrap();
        let got = tokens(&sample(&mut sharded, &hidden(2), &rows));
        assert!(got[0].as_ref().unwrap().iter().all(|t| [510, 511].contains(t)));
        assert_eq!(got[1], Err(RowError::NoFiniteLogit));
    }
}

#[test]
fn wrong_calls_are_refused_before_any_shard_is_asked() {
    let weight = integers(VOCAB * HIDDEN, 1);
    let mut sharded = Sharded::new(shards(&head(&weight), &STARTS, PLAN), ShardMerge::Winners).unwrap();
    let data = vec![0f32; 17 * HIDDEN];
    let mut call = |rows: usize, cols: usize, params: usize| {
        let params = vec![RowParams::default(); params];
        let input = Matrix::new(&data[..rows * cols], rows, cols).unwrap();
        sharded.sample(input, &params, &mut Samples::new())
    };
    assert!(matches!(call(1, HIDDEN - 1, 1), Err(SampleError::Hidden { .. })));
    assert!(matches!(call(2, HIDDEN, 1), Err(SampleError::RowCount { rows: 2, params: 1 })));
    assert!(matches!(call(17, HIDDEN, 17), Err(SampleError::TooManyRows { rows: 17, max_rows: 16 })));
    assert!(call(0, HIDDEN, 0).is_ok());
}

/// A shard that breaks its contract: draws once, whatever it is asked, and leaves its mass out.
struct Broken<'w>(Box<dyn PerturbedArgmax + 'w>);

impl PerturbedArgmax for Broken<'_> {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn shape(&self) -> Shape {
        self.0.shape()
    }

    fn plan(&self) -> flash_sampling_core::Plan {
        self.0.plan()
    }

    fn sample(&mut self, _: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let candidate =
            Candidate { winner: flash_sampling_core::Winner::new(1.0, self.0.shape().tokens.start), logit: 0.0 };
        rows.iter().for_each(|_| out.push_row([candidate], None, &[]));
        Ok(())
    }
}

#[test]
fn an_answer_that_does_not_fit_is_an_error_and_not_a_panic() {
    let weight = integers(VOCAB * HIDDEN, 1);
    let head = head(&weight);
    for merge in MERGES {
        let mut parts = shards(&head, &[0, 500], PLAN);
        parts[1] = Box::new(Broken(reference(head.slice(500..1000), PLAN, Scheme::Tiled)));
        let mut sharded = Sharded::new(parts, merge).unwrap();
        let mut call = |row| {
            let hidden = hidden(1);
            let mut out = Samples::new();
            let error = sharded.sample(Matrix::new(&hidden, 1, HIDDEN).unwrap(), &[row], &mut out).unwrap_err();
            assert!(out.is_empty());
            let source = error.source().and_then(|e| e.downcast_ref::<ShardError>());
            assert!(matches!(source, Some(ShardError::Answer { shard: 1, row: 0, .. })), "{error:?}");
        };
        call(RowParams { draws: 2, ..RowParams::default() });
        call(RowParams { logprobs: Some(1), ..RowParams::default() });
    }
}
