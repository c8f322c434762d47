//! Rows with filters that ranks decide on their GPUs. They have the draws of one GPU, and few stay undecided.

use super::filtered_rows::{TopPRows, histories, rows};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_core::{DType, Matrix, Order, PerturbedArgmax, Plan, RowParams, SampleError, Samples};
use flash_sampling_cuda::{CudaError, CudaExchange, CudaTiled, Device, DevicePeers};
use std::slice;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// The samples and the undecided rows of a call.
type Outcome = Result<(Samples, Vec<usize>), SampleError>;

/// A group with one rank per device.
struct Group<'w> {
    ranks: Vec<(CudaTiled<'w>, CudaExchange)>,
}

impl<'w> Group<'w> {
    /// Near-equal shards that begin at multiples of 4.
    fn new(problem: &'w Problem, plan: Plan, devices: &[Arc<Device>]) -> Group<'w> {
        let (vocab, world) = (problem.head().vocab_size(), devices.len() as u32);
        let starts: Vec<u32> = (0..world).map(|rank| vocab / world * rank / 4 * 4).collect();
        Group::of_shards(problem, plan, devices, &starts)
    }

    fn of_shards(problem: &'w Problem, plan: Plan, devices: &[Arc<Device>], starts: &[u32]) -> Group<'w> {
        let peers = DevicePeers::group(devices, CudaTiled::max_exchange_rows(&plan), Duration::from_secs(5)).unwrap();
        let shards = problem.head().split(starts);
        let mut ranks: Vec<_> = shards
            .into_iter()
            .zip(devices)
            .zip(peers)
            .map(|((shard, device), peers)| {
                let mut sampler = CudaTiled::new(shard, plan, device).unwrap();
                sampler.prepare_sharded().unwrap();
                (sampler, CudaExchange::from(peers))
            })
            .collect();
        let supports: Vec<_> = ranks.iter().map(|(sampler, _)| sampler.encode_support()).collect();
        ranks.iter_mut().for_each(|(_, exchange)| exchange.agree(&supports).unwrap());
        Group { ranks }
    }

    fn decides(&self, rows: &[RowParams<'_>]) -> Vec<bool> {
        self.ranks.iter().map(|(sampler, exchange)| sampler.can_filter_sharded(exchange, rows)).collect()
    }

    /// Makes a call with other hidden states and rows on each rank, and returns each rank's result.
    fn call<'i>(&mut self, of: impl Fn(usize) -> (Matrix<'i>, Vec<RowParams<'static>>) + Sync) -> Vec<Outcome> {
        thread::scope(|scope| {
            let of = &of;
            let sample = move |rank: usize, (sampler, exchange): &mut (CudaTiled<'w>, CudaExchange)| {
                let (mut out, mut open) = (Samples::new(), Vec::new());
                let (input, rows) = of(rank);
                sampler.sample_sharded(exchange, input, &rows, Some(&mut open), &mut out)?;
                Ok((out, open))
            };
            let ranks = self.ranks.iter_mut().enumerate();
            let threads: Vec<_> = ranks.map(|(at, rank)| scope.spawn(move || sample(at, rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Returns the samples and undecided rows of the first rank, and asserts that the other ranks have the same.
    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'static>]) -> (Samples, Vec<usize>) {
        let mut all: Vec<_> = self.call(|_| (input, rows.to_vec())).into_iter().map(Result::unwrap).collect();
        let first = all.swap_remove(0);
        for (out, open) in &all {
            assert_eq!(*open, first.1);
            first.0.iter().zip(out.iter()).for_each(|(a, b)| assert_eq!(drawn(a), drawn(b)));
        }
        first
    }
}

fn drawn<E>(row: Result<flash_sampling_core::RowSample<'_>, E>) -> Result<Vec<flash_sampling_core::Draw>, E> {
    row.map(|row| row.draws.to_vec())
}

/// Asserts that decided rows have the same draws or errors, and returns the number of rows with draws.
fn decided_rows_are_same(found: &Samples, want: &Samples, open: &[usize], rows: &[RowParams<'_>], what: &str) -> usize {
    let decided: Vec<_> = (0..rows.len()).filter(|r| !open.contains(r)).collect();
    for &r in &decided {
        assert_eq!(drawn(found.row(r)), drawn(want.row(r)), "{what}, row {r}: {:?}", rows[r]);
    }
    decided.into_iter().filter(|&r| want.row(r).is_ok()).count()
}

/// Calls of a single rank, which sends its records to itself. They run every kernel of ranks.
pub(crate) fn are_those_of_one_gpu_in_a_small_call(device: &Arc<Device>) {
    let plan = Plan { max_rows: 6, ..Plan::default() };
    // More tokens than a list holds.
    let problem = Problem::gaussian(Size::new(6, 4603, 72), DType::BF16, DType::BF16, 78);
    let mut alone = CudaTiled::new(problem.head(), plan, device).unwrap();
    let mut group = Group::new(&problem, plan, slice::from_ref(device));
    let base = RowParams { position: 5, ..RowParams::default() };
    let listed = [
        RowParams { top_k: 20, ..base },
        RowParams { min_p: 0.05, ..base },
        RowParams { top_k: 50, top_p: 0.9, mask: Some(&[0x0101_0101; 144]), ..base },
        RowParams { temperature: 0.0, ..base },
        RowParams { min_p: 0.3, logit_bias: &[(7, 3.0)], ..base },
        base,
    ];
    let by_mass = [0.95, 1.0, 0.05, 0.3, 0.8, 0.5].map(|top_p| RowParams { top_p, ..base });
    for rows in [listed, by_mass] {
        if !group.decides(&rows).iter().all(|&decides| decides) {
            assert_ne!(device.capability().0, 9);
            return;
        }
        let (mut want, (found, open)) = (Samples::new(), group.sample(problem.input(), &rows));
        alone.sample(problem.input(), &rows, &mut want).unwrap();
        decided_rows_are_same(&found, &want, &open, &rows, "one rank");
        assert!(open.len() < 3, "{open:?} left open");
    }
}

/// One rank per device; all devices may be the same GPU.
pub(crate) fn are_those_of_one_gpu(devices: &[Arc<Device>]) {
    let plan = Plan { max_rows: 40, max_draws: 3, ..Plan::default() };
    let problem = Problem::gaussian(Size::new(40, 6000, 264), DType::BF16, DType::BF16, 5);
    let mut alone = CudaTiled::new(problem.head(), plan, &devices[0]).unwrap();
    let mut group = Group::new(&problem, plan, devices);
    let lists = histories();
    if devices[0].capability().0 != 9 {
        assert!(group.decides(&rows(40, TopPRows::None, lists)).iter().all(|decides| !decides));
        return;
    }
    let (mut decided, mut left) = (0, 0);
    for (count, by_mass) in [
        (1, TopPRows::None),
        (40, TopPRows::None),
        (1, TopPRows::Bare),
        (40, TopPRows::Bare),
        (40, TopPRows::Knobs),
        (7, TopPRows::Knobs),
        (40, TopPRows::Bias),
        (8, TopPRows::None),
    ] {
        for pass in 0..4 {
            let mut rows = rows(count, by_mass, lists);
            if pass == 3 {
                // One call has rows of both kinds, each in its own launch.
                rows[count / 2] = RowParams { top_p: 0.7, top_k: 0, min_p: 0.0, ..rows[count / 2] };
                rows[count / 3] = RowParams { top_k: 9, ..rows[count / 3] };
            }
            rows.iter_mut().for_each(|row| row.position += 100 * pass);
            assert!(group.decides(&rows).iter().all(|&decides| decides), "{count} rows");
            let input = problem.input().row_range(0..count);
            let mut want = Samples::new();
            alone.sample(input, &rows, &mut want).unwrap();
            let (found, open) = group.sample(input, &rows);
            decided_rows_are_same(&found, &want, &open, &rows, &format!("{count} rows"));
            decided += count - open.len();
            left += open.len();
        }
    }
    // Short lists and bins in doubt leave about one row in a hundred undecided.
    assert!(30 * left <= decided, "{left} rows left open, {decided} decided");
}

/// Edge cases: equal logits on both ranks, rows without a finite logit, shards of unequal lengths, and a shard that
/// begins at no multiple of 4.
pub(crate) fn are_those_of_one_gpu_at_the_edges(devices: &[Arc<Device>; 2]) {
    const NONE: [u32; 188] = [0; 188];
    let plan = Plan { max_rows: 8, ..Plan::default() };
    let problem = Problem::integers(Size::new(8, 6000, 64), DType::BF16, DType::BF16, 5);
    let mut bytes: Vec<u8> = (0..8).flat_map(|r| problem.input().row_bytes(r).to_vec()).collect();
    // The third row has a NaN.
    bytes[2 * 64 * 2..][..2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    let input = Matrix::from_bytes(&bytes, DType::BF16, 8, 64, 64).unwrap();
    let mut alone = CudaTiled::new(problem.head(), plan, &devices[0]).unwrap();
    let is_hopper = devices.iter().all(|device| device.capability().0 == 9);
    let mut compared = 0;
    for starts in [[0, 3000], [0, 1204], [0, 4999]] {
        let mut group = Group::of_shards(&problem, plan, devices, &starts);
        for row in [
            RowParams { top_k: 20, ..RowParams::default() },
            RowParams { min_p: 0.1, ..RowParams::default() },
            RowParams { top_k: 50, top_p: 0.9, ..RowParams::default() },
            RowParams { top_p: 0.9, ..RowParams::default() },
        ] {
            let mut rows: Vec<_> = (0..8).map(|seed| RowParams { seed, ..row }).collect();
            rows[5].mask = Some(&NONE);
            // Top-p alone needs shards that begin at multiples of 4.
            let is_decided = is_hopper && (row.top_k > 0 || row.min_p > 0.0 || starts[1] % 4 == 0);
            assert_eq!(group.decides(&rows), [is_decided; 2], "shards from {starts:?}, {row:?}");
            if !is_decided {
                continue;
            }
            let mut want = Samples::new();
            alone.sample(input, &rows, &mut want).unwrap();
            assert!(want.row(2).is_err() && want.row(5).is_err() && want.row(0).is_ok());
            let (found, open) = group.sample(input, &rows);
            compared += decided_rows_are_same(&found, &want, &open, &rows, &format!("shards from {starts:?}"));
        }
    }
    // There are 66 valid rows in all.
    assert!(!is_hopper || compared > 20, "{compared} rows compared");
}

/// Two ranks have different filters, or the same filters with different temperatures, and then equal calls.
pub(crate) fn are_named_where_they_differ(devices: &[Arc<Device>; 2]) {
    let plan = Plan { max_rows: 4, ..Plan::default() };
    let problem = Problem::gaussian(Size::new(4, 6000, 264), DType::BF16, DType::BF16, 5);
    let mut group = Group::new(&problem, plan, devices);
    let input = problem.input();
    let base = RowParams::default();
    let listed = |top_k| RowParams { top_k, ..base };
    let by_mass = RowParams { top_p: 0.9, ..base };
    let late = |temperature| RowParams { order: Order::LlamaCpp, temperature, ..listed(20) };
    for (same, others) in [
        (listed(20), [20, 21].map(listed)),
        (by_mass, [20, 21].map(|top_k| RowParams { top_k, ..by_mass })),
        (late(0.5), [0.5, 2.0].map(late)),
    ] {
        let of = |row| (0..4).map(|seed| RowParams { seed, ..row }).collect::<Vec<_>>();
        let rows = of(same);
        if !group.decides(&rows).iter().all(|&decides| decides) {
            assert_ne!(devices[0].capability().0, 9);
            return;
        }
        let (before, _) = group.sample(input, &rows);
        name_each_other(group.call(|rank| (input, of(others[rank]))));
        let (after, _) = group.sample(input, &rows);
        before.iter().zip(after.iter()).for_each(|(a, b)| assert_eq!(drawn(a), drawn(b)));
    }
}

/// Asserts that two ranks name each other in their errors.
fn name_each_other(outcomes: Vec<Outcome>) {
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let Err(SampleError::Backend { source, .. }) = outcome else { panic!("rank {rank} drew") };
        let found = source.downcast_ref::<CudaError>().cloned();
        assert_eq!(found, Some(CudaError::OtherCall { rank: Some(1 - rank), row: Some(0) }));
    }
}

/// One rank has top-p alone in a row with a top-k on the other rank. The ranks draw this row in different launches, so
/// each misses the other.
pub(crate) fn are_named_where_launches_differ(devices: &[Arc<Device>; 2]) {
    let plan = Plan { max_rows: 4, ..Plan::default() };
    let problem = Problem::gaussian(Size::new(4, 6000, 264), DType::BF16, DType::BF16, 5);
    let mut group = Group::new(&problem, plan, devices);
    let mut rows: Vec<_> = (0..4).map(|seed| RowParams { seed, top_k: 20, ..RowParams::default() }).collect();
    if group.decides(&rows).iter().all(|&decides| decides) {
        let listed = rows.clone();
        rows[3] = RowParams { top_k: 0, top_p: 0.9, ..rows[3] };
        name_each_other(group.call(|rank| (problem.input(), [&listed, &rows][rank].clone())));
    }
}
