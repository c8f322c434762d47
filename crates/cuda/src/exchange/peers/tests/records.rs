//! Tests of the records that ranks exchange for rows with filters, with one slow reader. Only the Hopper kernel makes
//! the inputs of records; skipped on other GPUs.

use super::fan_out::{bf16, hoppers};
use super::*;
use crate::{CudaExchange, CudaTiled};
use flash_sampling_core::{DType, Draw, Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};

const VOCAB: usize = 6000;
const HIDDEN: usize = 64;
const ROWS: usize = 8;
const STEPS: usize = 30;
const STARTS: [u32; 3] = [0, 1500, 1544];

/// The draws of each row of each step.
type Steps = Vec<Vec<Vec<Draw>>>;

fn matrix(numbers: &[u16]) -> Matrix<'_> {
    Matrix::from_bytes(bytemuck::cast_slice(numbers), DType::BF16, numbers.len() / HIDDEN, HIDDEN, HIDDEN).unwrap()
}

/// The rows of a step, with a position unique to the step.
fn rows(row: RowParams<'static>, step: usize) -> Vec<RowParams<'static>> {
    (0..ROWS as u64).map(|seed| RowParams { seed, position: step as u64, ..row }).collect()
}

fn draws(out: &Samples) -> Vec<Vec<Draw>> {
    out.iter().map(|row| row.map_or_else(|_| Vec::new(), |row| row.draws.to_vec())).collect()
}

/// Samples on ranks whose second reads late. `None` for a step that missed a rank; undecided rows have no draws.
fn sample(
    (head, hidden, row): (&Head<'_>, &[u16], RowParams<'static>),
    devices: &[Arc<Device>],
    turns: u32,
    steps: usize,
) -> Vec<Option<Steps>> {
    let plan = Plan { max_rows: ROWS, ..Plan::default() };
    let limit = Duration::from_secs(1);
    let group = DevicePeers::group(devices, CudaTiled::max_exchange_rows(&plan), limit).unwrap();
    let mut ranks: Vec<_> = head
        .split(&STARTS)
        .into_iter()
        .zip(group)
        .map(|(shard, mut peers)| {
            let mut sampler = CudaTiled::new(shard, plan, &peers.device).unwrap();
            sampler.prepare_sharded().unwrap();
            peers.call.turns = turns;
            peers.call.pause = if peers.rank() == 1 { 100_000 } else { 0 };
            (sampler, CudaExchange::from(peers))
        })
        .collect();
    let supports: Vec<_> = ranks.iter().map(|(sampler, _)| sampler.encode_support()).collect();
    for (sampler, exchange) in &mut ranks {
        exchange.agree(&supports).unwrap();
        assert!(sampler.can_filter_sharded(exchange, &rows(row, 0)));
    }
    std::thread::scope(|scope| {
        let run = |(sampler, exchange): &mut (CudaTiled<'_>, CudaExchange)| {
            let (mut open, mut out) = (Vec::new(), Samples::new());
            let step = |step| {
                let input = matrix(&hidden[step * ROWS * HIDDEN..][..ROWS * HIDDEN]);
                sampler.sample_sharded(exchange, input, &rows(row, step), Some(&mut open), &mut out).ok()?;
                Some(draws(&out))
            };
            (0..steps).map(step).collect()
        };
        let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_that_reads_records_late_still_finds_them_and_with_one_mailbox_for_both_kinds_does_not() {
    let _alone = capture_lock();
    let (weight, hidden) = (bf16(1, VOCAB * HIDDEN), bf16(2, STEPS * ROWS * HIDDEN));
    let head = Head::new(matrix(&weight)).unwrap().with_scale(0.25).unwrap();
    let base = RowParams::default();
    let by_mass = RowParams { top_p: 0.5, temperature: 2.0, ..base };
    let plan = Plan { max_rows: ROWS, ..Plan::default() };
    for devices in hoppers() {
        let mut alone = CudaTiled::new(head, plan, &devices[0]).unwrap();
        for (row, turns, steps) in [
            (RowParams { top_k: 20, ..base }, 2, STEPS),
            (RowParams { min_p: 0.05, ..base }, 2, STEPS),
            (by_mass, 2, STEPS),
            (by_mass, 2, 1),
            // The negative control. It has one step: in a second step, the mailboxes of draws would also be too few.
            (by_mass, 1, 1),
        ] {
            let want: Steps = (0..steps)
                .map(|step| {
                    let mut out = Samples::new();
                    let input = matrix(&hidden[step * ROWS * HIDDEN..][..ROWS * HIDDEN]);
                    alone.sample(input, &rows(row, step), &mut out).unwrap();
                    draws(&out)
                })
                .collect();
            let found = sample((&head, &hidden, row), &devices, turns, steps);
            let rows = |found: &Option<Steps>| found.iter().flatten().flatten().cloned().collect::<Vec<_>>();
            let (all, wanted) = (found.iter().map(rows).collect::<Vec<_>>(), rows(&Some(want)));
            let is_right = all.iter().all(|found| {
                let open = found.iter().filter(|draws| draws.is_empty()).count();
                let is_same = |(found, want): (&Vec<Draw>, &Vec<Draw>)| found.is_empty() || found == want;
                found.len() == wanted.len() && 10 * open <= found.len() && found.iter().zip(&wanted).all(is_same)
            });
            assert_eq!(is_right, turns == 2, "{row:?}, {turns} mailboxes: {all:?} against {wanted:?}");
        }
    }
}
