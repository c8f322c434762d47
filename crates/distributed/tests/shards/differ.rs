//! Ranks with different calls: the error names the difference, and nothing is drawn.

use crate::common::*;
use core::error::Error;
use flash_sampling_core::{History, Matrix, PerturbedArgmax, RowParams, SampleError, Samples};
use flash_sampling_distributed::{ShardError, ShardMerge, ShardOptions, ShardSampler, Transforms};

/// The results of two ranks in a call for which rank 1 has other parameters than rank 0.
fn called(params: [RowParams<'_>; 2]) -> Vec<Result<u32, ShardError>> {
    let hidden = hidden(1);
    samplers(&integer_head(), &[0, 500], PLAN, ShardMerge::Winners, |rank, sampler| {
        let (input, mut out) = (Matrix::new(&hidden, 1, HIDDEN).unwrap(), Samples::new());
        match sampler.sample(input, &[params[rank]], &mut out) {
            Ok(()) => Ok(out.row(0).unwrap().token()),
            Err(SampleError::Backend { source, .. }) => Err(*source.downcast().unwrap()),
            Err(error) => panic!("{error}: {:?}", error.source()),
        }
    })
}

#[test]
fn a_mismatch_is_named_also_between_lists_of_the_same_length() {
    let row = RowParams { seed: 3, ..RowParams::default() };
    let (mask, other_mask) = (mask_of(&[1, 2]), mask_of(&[1, 3]));
    let histories = [[5, 6], [5, 7], [7, 6]].map(|[prompt, output]| {
        let mut history = History::new(&[prompt]);
        history.push(output);
        history
    });
    let of_history = |at: usize| RowParams { history: Some(&histories[at]), presence_penalty: 1.0, ..row };
    let different = [
        ("mask", [RowParams { mask: Some(&mask), ..row }, RowParams { mask: Some(&other_mask), ..row }]),
        ("logit bias", [RowParams { logit_bias: &[(7, 1.0)], ..row }, RowParams { logit_bias: &[(8, 1.0)], ..row }]),
        ("logit bias", [RowParams { logit_bias: &[(7, 1.0)], ..row }, RowParams { logit_bias: &[(7, 2.0)], ..row }]),
        ("bans and stops", [RowParams { banned: &[4], ..row }, RowParams { banned: &[5], ..row }]),
        ("bans and stops", [RowParams { min_tokens: 1, ..row }, RowParams { min_tokens: 2, ..row }]),
        ("history", [of_history(0), of_history(1)]),
        ("history", [of_history(0), of_history(2)]),
        ("position", [row, RowParams { position: 1, ..row }]),
        ("temperature", [row, RowParams { temperature: 0.5, ..row }]),
        ("filters", [RowParams { top_k: 5, ..row }, RowParams { top_k: 6, ..row }]),
        ("penalties", [of_history(0), RowParams { presence_penalty: 0.5, ..of_history(0) }]),
        // The first of two differences is named.
        ("seed", [row, RowParams { seed: 4, temperature: 0.5, ..row }]),
    ];
    for (name, params) in different {
        for (rank, said) in called(params).into_iter().enumerate() {
            let other = 1 - rank;
            let Err(ShardError::Params { shard, row: 0, what }) = said else { panic!("{said:?}") };
            assert_eq!((shard, what), (other, name));
        }
        // The negative control: equal lists in separate memory are no mismatch.
        let said = called([params[0]; 2]);
        assert!(said[0].is_ok() && said[0].as_ref().ok() == said[1].as_ref().ok(), "{said:?}");
    }
}

#[test]
fn heads_that_do_something_else_to_their_dot_products_are_refused() {
    let plain = integer_head();
    let capped = plain.with_soft_cap(30.0).unwrap();
    for (mine, theirs, says) in [
        (
            plain,
            capped,
            "shard 1 has a head with no bias, soft-cap 30, scale 0.125, but shard 0 has no bias, no soft-cap, scale 0.125",
        ),
        (capped, capped.with_scale(2.0).unwrap(), "shard 1 has a head with no bias, soft-cap 30, scale 2"),
    ] {
        let heads = [mine, theirs];
        let errors = group(2, |r, transport| {
            let options = ShardOptions::new(ShardMerge::Winners).of_head(&heads[r]);
            ShardSampler::new(shards(&heads[r], &[0, 500], PLAN).swap_remove(r), transport, options).unwrap_err()
        });
        for error in errors {
            let ShardError::Mismatch { shard: 1, other: 0, found, .. } = &error else { panic!("{error}") };
            assert_eq!(*found, Transforms::of(&theirs).to_string());
            assert!(error.to_string().starts_with(says), "{error}");
        }
    }
}
