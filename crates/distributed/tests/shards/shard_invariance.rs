//! The merge by log-mass: the tokens of the reference of Alg. I.4, and what it refuses.

use crate::common::*;
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{Exactness, Plan, RowError, RowParams};
use flash_sampling_distributed::{ShardMerge, Sharded};

const CUTS: [&[u32]; 4] = [&[0], &[0, 500], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], &STARTS];

#[test]
fn log_mass_gives_the_tokens_of_the_reference() {
    let weight = integers(VOCAB * HIDDEN, 2);
    let head = head(&weight);
    let (mask, none) = (mask_of(&[2, 3, 999]), mask_of(&[]));
    let rows = rows(&mask, &none);
    let hidden = hidden(rows.len());
    for starts in CUTS {
        let mut want = reference(head, PLAN, ReferenceVariant::Sharded(starts.to_vec()));
        let mut sharded = Sharded::new(shards(&head, starts, PLAN), ShardMerge::LogMass).unwrap();
        // Each position draws another shard.
        for position in 0..300 {
            let rows: Vec<_> = rows.iter().map(|row| RowParams { position, ..*row }).collect();
            let (got, want) = (sample(&mut sharded, &hidden, &rows), sample(&mut *want, &hidden, &rows));
            assert_eq!(all(&got), all(&want), "shards at {starts:?}, position {position}");
        }
    }
}

#[test]
fn log_mass_says_what_it_is_and_refuses_lists() {
    let weight = integers(VOCAB * HIDDEN, 3);
    let mut sharded = Sharded::new(shards(&head(&weight), &STARTS, PLAN), ShardMerge::LogMass).unwrap();
    assert_eq!(flash_sampling_core::PerturbedArgmax::capabilities(&sharded).exactness, Exactness::InDistribution);
    let mask = mask_of(&[2, 3, 999]);
    let rows = lists(&mask);
    let knob = flash_sampling_core::Knob::WithoutReplacement;
    for row in sample(&mut sharded, &hidden(rows.len()), &rows).iter() {
        assert_eq!(row.unwrap_err(), RowError::Unsupported { knob, alternative: "a merge of shards by winners" });
    }
}

#[test]
fn a_restricted_plan_refuses_what_the_shards_could_do() {
    let weight = integers(VOCAB * HIDDEN, 4);
    let narrow = Plan { max_logprobs: None, max_draws: 2, ..PLAN };
    let rows = [
        RowParams { logprobs: Some(1), ..RowParams::default() },
        RowParams { draws: 3, ..RowParams::default() },
        RowParams::default(),
    ];
    let hidden = hidden(rows.len());
    let want =
        sample(&mut *reference(head(&weight), narrow, ReferenceVariant::Sharded(STARTS.to_vec())), &hidden, &rows);
    let sharded = Sharded::new(shards(&head(&weight), &STARTS, PLAN), ShardMerge::LogMass).unwrap();
    let got = sample(&mut sharded.with_plan(narrow).unwrap(), &hidden, &rows);
    assert_eq!(all(&got), all(&want));
}

#[test]
fn other_groupings_inside_a_shard_are_merged_by_log_mass_only() {
    let weight = integers(VOCAB * HIDDEN, 6);
    let head = head(&weight);
    let mixed = || {
        let schemes = [ReferenceVariant::Online(64), ReferenceVariant::Tiled, ReferenceVariant::Grouped(32)];
        let parts = head.split(&[0, 300, 600]).into_iter().zip(schemes);
        parts.map(|(shard, scheme)| reference(shard, PLAN, scheme)).collect::<Vec<_>>()
    };
    assert!(Sharded::new(mixed(), ShardMerge::Winners).is_err());
    let mut sharded = Sharded::new(mixed(), ShardMerge::LogMass).unwrap();
    let row = RowParams { draws: 12, ..RowParams::default() };
    // The draw of the shard uses the same noise and mass as the reference, so shards agree; tokens may not.
    let mut want = reference(head, PLAN, ReferenceVariant::Sharded(vec![0, 300, 600]));
    let hidden = hidden(1);
    for position in 0..100 {
        let rows = [RowParams { position, ..row }];
        let shard = |t: &u32| t / 300;
        let [got, want] = [&mut sharded as &mut dyn flash_sampling_core::PerturbedArgmax, &mut *want]
            .map(|s| tokens(&sample(s, &hidden, &rows))[0].as_ref().unwrap().iter().map(shard).collect::<Vec<_>>());
        assert_eq!(got.len(), 12);
        assert!(got.iter().zip(&want).all(|(g, w)| g.min(&2) == w.min(&2)), "position {position}");
    }
}
