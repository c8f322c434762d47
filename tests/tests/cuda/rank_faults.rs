//! Calls of ranks that do not wait: a rank skips a call, or makes another call.

use super::backends::gpu_columns::VOCAB;
use super::backends::gpu_ranks::GpuRanks;
use super::backends::rank_tests::of_cuda;
use super::group;
use super::rank_group::{OnRank, OnRankArrays, call, each_rank, prepare};
use super::{TIME_LIMIT, load_kernels};
use flash_sampling::GpuExchange;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_core::{DType, Plan, RowParams};
use flash_sampling_cuda::CudaError;
use flash_sampling_cuda::abi::{failed_rank, status};
use std::time::{Duration, Instant};

/// Statuses without the rank, and the ranks.
pub(crate) fn statuses(rank: &OnRank, arrays: &OnRankArrays) -> Vec<(u32, Option<usize>)> {
    let of = |(status, token, ..): (u32, i64, f32, f32)| {
        assert_eq!(token == -1, status & 0xff != status::DRAWN);
        (status & 0xff, failed_rank(status))
    };
    arrays.results.read(&rank.stream).into_iter().map(of).collect()
}

/// The second rank skips a call. In its next call, it meets the draws of the skipped call, and rank 0 meets the draws of
/// the next call. Both ranks detect the mismatch, unless the rows of both calls are equal: the control. Then rank 0 waits
/// for a call that does not come, and the group is unusable.
pub(crate) fn a_skipped_call_is_detected(factory: GpuRanks) {
    let problem = Problem::gaussian(Size::new(5, VOCAB, 136), DType::BF16, DType::BF16, 20);
    let plan = Plan { max_rows: 5, ..Plan::default() };
    load_kernels(&problem, plan);
    // With top-p, ranks also gather their logits.
    for (is_control, top_p) in [(false, 1.0), (true, 1.0), (false, 0.9), (true, 0.9)] {
        let rows = |position| vec![RowParams { seed: 5, position, top_p, ..RowParams::default() }; 5];
        let mut ranks = group(factory, &problem, plan, Duration::from_secs(2));
        prepare(&mut ranks, 0, true);
        let skipped = ranks[0].arrays(&rows(1), VOCAB);
        let position = if is_control { 1 } else { 2 };
        let next: Vec<_> = ranks.iter().map(|rank| rank.arrays(&rows(position), VOCAB)).collect();
        let last: Vec<_> = ranks.iter().map(|rank| rank.arrays(&rows(3), VOCAB)).collect();
        let calls: Vec<_> = next.iter().chain(&last).map(|arrays| (arrays.columns, arrays.out)).collect();
        let first = (skipped.columns, skipped.out);
        let waits = each_rank(&mut ranks, |number, rank| {
            let hidden = rank.hidden;
            if number == 0 {
                rank.enqueue(hidden, first).unwrap();
            }
            rank.enqueue(hidden, calls[number]).unwrap();
            rank.sampler.wait(&rank.stream).map_err(of_cuda)
        });
        let met = if is_control { (status::DRAWN, None) } else { (status::OTHER_CALL, Some(1)) };
        assert_eq!(statuses(&ranks[0], &skipped), [met; 5], "control: {is_control}, {top_p}");
        assert_eq!(statuses(&ranks[0], &next[0]), [(status::LATE_RANK, Some(1)); 5]);
        let met = if is_control { met } else { (status::OTHER_CALL, Some(0)) };
        assert_eq!(statuses(&ranks[1], &next[1]), [met; 5], "control: {is_control}, {top_p}");
        assert!(is_late(&waits[0], &[1]), "{waits:?}");
        assert_eq!(waits[1], Ok(()));
        // Rank 0 sends nothing any more, and does not wait.
        let waits = each_rank(&mut ranks, |number, rank| {
            let begun = Instant::now();
            let hidden = rank.hidden;
            rank.enqueue(hidden, calls[2 + number]).unwrap();
            (rank.sampler.wait(&rank.stream).map_err(of_cuda), begun.elapsed())
        });
        assert!(is_late(&waits[0].0, &[1]) && waits[0].1 < Duration::from_millis(500), "{waits:?}");
        assert_eq!(statuses(&ranks[0], &last[0]), [(status::LATE_RANK, Some(1)); 5]);
        // Rank 1 meets the draws that rank 0 sent before its timeout. A call that gathers logits has another exchange, to
        // which rank 0 does not come.
        let met = if top_p < 1.0 { status::LATE_RANK } else { status::OTHER_CALL };
        assert_eq!(statuses(&ranks[1], &last[1]), [(met, Some(0)); 5], "control: {is_control}, {top_p}");
        drop_outside_captures(ranks);
    }
}

pub(crate) fn is_late(waited: &Result<(), CudaError>, expected: &[usize]) -> bool {
    matches!(waited, Err(CudaError::LateRanks { ranks, .. }) if ranks == expected)
}

/// Other positions, an array that one rank does not have, and by peers other filters and, with filters, other biases and
/// masks. The control: without filters, other biases are not compared, and all ranks still draw the same token. The group
/// continues.
pub(crate) fn other_calls_are_detected(factory: GpuRanks) {
    let problem = Problem::gaussian(Size::new(5, VOCAB, 136), DType::BF16, DType::BF16, 21);
    let plan = Plan { max_rows: 5, ..Plan::default() };
    load_kernels(&problem, plan);
    let mut ranks = group(factory, &problem, plan, TIME_LIMIT);
    prepare(&mut ranks, 4, factory.exchange == GpuExchange::Peers);
    let row = RowParams { seed: 5, position: 1, ..RowParams::default() };
    let masks = [vec![!0u32; VOCAB.div_ceil(32)], vec![!2u32; VOCAB.div_ceil(32)]];
    let (biased, filtered) = (RowParams { logit_bias: &[(9, 1.0)], ..row }, RowParams { top_p: 0.9, ..row });
    let both = RowParams { logit_bias: &[(9, 1.0)], ..filtered };
    let masked = masks.each_ref().map(|mask| RowParams { mask: Some(mask), ..filtered });
    let by_nccl = factory.exchange == GpuExchange::Nccl;
    let plain = [
        (row, row, true),
        (row, RowParams { position: 2, ..row }, false),
        (row, RowParams { banned: &[7], ..row }, false),
        (biased, RowParams { logit_bias: &[(9, 2.0)], ..row }, true),
    ];
    let whole = [
        (filtered, filtered, true),
        (filtered, RowParams { top_p: 0.8, ..row }, false),
        (both, both, true),
        (both, RowParams { logit_bias: &[(9, 2.0)], ..filtered }, false),
        (masked[0], masked[1], false),
        (masked[0], masked[0], true),
    ];
    for (row, other, is_same) in plain.into_iter().chain(whole.into_iter().filter(|_| !by_nccl)) {
        let of_rank = [vec![row; 5], vec![other; 5]];
        let arrays: Vec<_> = ranks.iter().zip(&of_rank).map(|(rank, rows)| rank.arrays(rows, VOCAB)).collect();
        call(&mut ranks, 0..5, &arrays);
        for (number, (rank, arrays)) in ranks.iter().zip(&arrays).enumerate() {
            let expected = match is_same {
                true => (status::DRAWN, None),
                false => (status::OTHER_CALL, (!by_nccl).then_some(1 - number)),
            };
            assert_eq!(statuses(rank, arrays), [expected; 5], "{row:?}, {other:?}");
        }
    }
    drop_outside_captures(ranks);
}
