//! Tests of the exchange on GPUs with synthetic draws: all ranks on the first GPU, and on all GPUs if there are
//! several. Skipped without a GPU, unless `FLASH_SAMPLING_REQUIRE` names cuda.

mod fan_out;
mod processes;
mod records;

use super::*;
use crate::abi::DeviceAddress;
use crate::abi::Row;
use cudarc::driver::CudaSlice;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use flash_sampling_core::backend::Winner;
use flash_sampling_core::{Domain, Noise};
use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

const LIMIT: Duration = Duration::from_secs(5);

/// The lock for exclusive use of the GPUs: ranks that share a GPU wait for each other within a timeout.
fn capture_lock() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The placements of a group's ranks: all on the first GPU, and spread over all GPUs if there are several.
fn placings(world: usize) -> Vec<Vec<Arc<Device>>> {
    let first = match Device::new(0) {
        Ok(first) => first,
        Err(error) => {
            let required = std::env::var("FLASH_SAMPLING_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|r| r == "cuda"), "{error}, but FLASH_SAMPLING_REQUIRE names cuda");
            // The test harness captures the print macros, but not this write.
            let _ = writeln!(std::io::stderr(), "skipped: 1 test of cuda/peers: {error}");
            return Vec::new();
        }
    };
    let all: Vec<_> = (0..).map_while(|ordinal| Device::new(ordinal).ok()).collect();
    let mut placings = vec![vec![first; world]];
    if all.len() > 1 {
        placings.push((0..world).map(|rank| all[rank % all.len()].clone()).collect());
    }
    placings
}

fn word(seed: u64, i: u32) -> u32 {
    Noise::new(seed, 1).unwrap().word(Domain::Generator, 2, i)
}

/// A shard's synthetic draw for a row: a token of the shard, some with equal scores; sometimes nothing or an error.
fn shard_draw(step: u32, rank: usize, row: usize) -> Draw {
    let at = |i| word(u64::from(step) << 32 | (rank as u64) << 16 | row as u64, i);
    let token = 1000 * rank as u32 + at(0) % 1000;
    let none = Draw { token: u32::MAX, score: f32::NEG_INFINITY, logit: f32::NEG_INFINITY, status: 1 };
    match at(1) % 16 {
        0 => none,
        1 if row % 4 == 3 => Draw { token, status: status::NAN, ..Draw::default() },
        2 if row % 4 == 3 => {
            let is_transformed = (at(3) % 2) as f32;
            Draw { token, score: is_transformed, status: status::POSITIVE_INFINITY, ..Draw::default() }
        }
        // Another rank has the same score, so this is a tie.
        3 | 4 => Draw { token, score: 2.5, logit: rank as f32, status: status::DRAWN },
        _ => {
            let score = (at(2) % 4001) as f32 / 400.0 - 5.0;
            Draw { token, score, logit: score - 1.0, status: status::DRAWN }
        }
    }
}

/// The draw of the whole vocabulary, by the core crate's winners.
fn whole_draw(step: u32, world: usize, row: usize) -> Draw {
    let draws: Vec<_> = (0..world).map(|rank| shard_draw(step, rank, row)).collect();
    let is_invalid = |draw: &&Draw| draw.status == status::NAN || draw.status == status::POSITIVE_INFINITY;
    // A raw logit first, then the lowest token.
    let place = |draw: &&Draw| (draw.score != 0.0, draw.token);
    if let Some(invalid) = draws.iter().filter(is_invalid).min_by_key(place) {
        return *invalid;
    }
    let drawn = draws.iter().filter(|draw| draw.status == status::DRAWN);
    let best = drawn.max_by_key(|draw| Winner::new(draw.score, draw.token).to_ordered_bits());
    best.copied().unwrap_or(draws[0])
}

/// A rank, its stream, and the inputs of all steps in device memory.
struct Rank {
    peers: DevicePeers,
    stream: Arc<CudaStream>,
    rows: CudaSlice<Row>,
    draws: CudaSlice<Draw>,
    /// The addresses of rows and draws; taking them during a capture would be captured.
    rows_at: DeviceAddress<Row>,
    draws_at: DeviceAddress<Draw>,
    /// The first row and the number of rows of each step.
    steps: Vec<(usize, usize)>,
}

impl Rank {
    fn new(peers: DevicePeers, counts: &[usize]) -> Rank {
        let stream = peers.device().stream().unwrap();
        let mut steps = Vec::new();
        let (mut rows, mut draws) = (Vec::new(), Vec::new());
        for (step, &count) in (0..).zip(counts) {
            steps.push((rows.len(), count));
            rows.extend((0..count).map(|row| Row { seed: row as u64, position: u64::from(step), ..Row::default() }));
            draws.extend((0..count).map(|row| shard_draw(step, peers.rank(), row)));
        }
        let (rows, draws) = (stream.clone_htod(&rows).unwrap(), stream.clone_htod(&draws).unwrap());
        let (rows_at, draws_at) = (DeviceAddress::of(&rows, &stream), DeviceAddress::of(&draws, &stream));
        stream.synchronize().unwrap();
        Rank { peers, stream, rows, draws, rows_at, draws_at, steps }
    }

    fn launch(&mut self, step: usize) {
        let (at, count) = self.steps[step];
        let rows = self.rows_at.add(at);
        let draws = self.draws_at.add(at);
        // SAFETY: this value holds both, with this many rows from these addresses on; one stream.
        unsafe { self.peers.launch(&self.stream, rows, draws, count) }.unwrap();
    }

    /// The draws of every step, after all launches have run.
    fn draws(&self) -> Vec<Vec<Draw>> {
        let draws = self.stream.clone_dtoh(&self.draws).unwrap();
        self.stream.synchronize().unwrap();
        self.steps.iter().map(|&(at, count)| draws[at..at + count].to_vec()).collect()
    }
}

fn ranks(devices: &[Arc<Device>], counts: &[usize], limit: Duration) -> Vec<Rank> {
    let most = counts.iter().copied().max().unwrap();
    let group = DevicePeers::group(devices, most, limit).unwrap();
    group.into_iter().map(|peers| Rank::new(peers, counts)).collect()
}

/// Enqueues all steps on all ranks, the host far ahead of the GPUs, and describes the first wrong draw.
fn first_wrong(ranks: &mut [Rank]) -> Option<String> {
    for rank in &mut *ranks {
        (0..rank.steps.len()).for_each(|step| rank.launch(step));
    }
    let world = ranks.len();
    for rank in ranks {
        for (step, draws) in (0..).zip(rank.draws()) {
            for (row, &found) in draws.iter().enumerate() {
                let expected = whole_draw(step, world, row);
                if found != expected {
                    let of = rank.peers.rank();
                    return Some(format!("rank {of} of {world}, step {step}, row {row}: {found:?}, not {expected:?}"));
                }
            }
        }
    }
    None
}

#[test]
fn every_rank_has_the_best_draw_of_all_shards() {
    let _alone = capture_lock();
    for world in [1, 2, 3, 4, 8] {
        for devices in placings(world) {
            let counts: Vec<_> = (0..60).map(|step| [1, 64, 3, 256, 17, 2][step % 6]).collect();
            assert_eq!(first_wrong(&mut ranks(&devices, &counts, LIMIT)), None);
        }
    }
}

#[test]
fn a_rank_that_reads_late_still_finds_what_was_sent_to_it() {
    let _alone = capture_lock();
    for devices in placings(3) {
        for slow in 0..3 {
            let mut ranks = ranks(&devices, &[5; 100], LIMIT);
            ranks[slow].peers.call.pause = 100_000;
            assert_eq!(first_wrong(&mut ranks), None, "rank {slow} is slow");
        }
    }
}

/// The negative control: with one mailbox instead of two, fast ranks overwrite draws that the slow rank has not read.
#[test]
fn one_mailbox_in_place_of_two_loses_draws() {
    let _alone = capture_lock();
    for devices in placings(3) {
        let mut ranks = ranks(&devices, &[5; 100], Duration::from_millis(20));
        for rank in &mut ranks {
            rank.peers.call.turns = 1;
        }
        ranks[1].peers.call.pause = 100_000;
        assert!(first_wrong(&mut ranks).is_some());
    }
}

#[test]
fn a_rank_that_withholds_its_draws_is_named_within_the_time_limit() {
    let _alone = capture_lock();
    let limit = Duration::from_millis(50);
    for devices in placings(4) {
        let mut ranks = ranks(&devices, &[7; 3], limit);
        // Rank 2 takes part only in the first step.
        (0..4).for_each(|rank| ranks[rank].launch(0));
        let begun = Instant::now();
        [0, 1, 3].into_iter().for_each(|rank| ranks[rank].launch(1));
        for rank in [0, 1, 3] {
            let draws = ranks[rank].draws();
            assert_eq!(ranks[rank].peers.check(&draws[0]), Ok(()));
            assert!(draws[1].iter().all(|draw| draw.status == status::LATE_RANK && draw.token == 2), "{draws:?}");
            assert_eq!(ranks[rank].peers.check(&draws[1]), Err(CudaError::LateRanks { ranks: vec![2], limit }));
        }
        assert!(begun.elapsed() >= limit && begun.elapsed() < 20 * limit, "{:?}", begun.elapsed());
        // The group is broken, so ranks do not wait.
        let begun = Instant::now();
        ranks[0].launch(2);
        let draws = ranks[0].draws();
        assert_eq!(ranks[0].peers.check(&draws[2]), Err(CudaError::LateRanks { ranks: vec![2], limit }));
        assert!(begun.elapsed() < limit, "{:?}", begun.elapsed());
    }
}

#[test]
fn a_rank_that_is_called_otherwise_is_named() {
    let _alone = capture_lock();
    for devices in placings(3) {
        let mut ranks = ranks(&devices, &[6, 6], LIMIT);
        let seeds: Vec<_> = (0..6).map(|row| Row { seed: row ^ u64::from(row == 4), ..Row::default() }).collect();
        let stream = ranks[1].stream.clone();
        stream.memcpy_htod(&seeds, &mut ranks[1].rows.slice_mut(..6)).unwrap();
        assert!(first_wrong(&mut ranks).is_some());
        let blamed = |rank: usize| ranks[rank].peers.check(&ranks[rank].draws()[0]);
        assert_eq!(blamed(0), Err(CudaError::OtherCall { rank: Some(1), row: Some(4) }));
        assert_eq!(blamed(2), Err(CudaError::OtherCall { rank: Some(1), row: Some(4) }));
        assert_eq!(blamed(1), Err(CudaError::OtherCall { rank: Some(0), row: Some(4) }));
        // The mismatch does not affect the next step.
        for rank in &ranks {
            assert_eq!(rank.peers.check(&rank.draws()[1]), Ok(()));
        }
    }
}

/// Rank 0 fails before a launch of the other ranks; its next step then reads the draws of that launch.
#[test]
fn what_was_sent_for_a_launch_that_a_rank_left_out_is_not_taken_for_its_next() {
    let _alone = capture_lock();
    let limit = Duration::from_millis(500);
    for devices in placings(3) {
        for is_marked in [true, false] {
            let mut ranks = ranks(&devices, &[4; 2], limit);
            let mark = |number: u64| if is_marked { number } else { 0 };
            // Launches on both ranks, before the wait for either.
            for rank in &mut ranks[1..] {
                rank.peers.set_mark(mark(1));
                rank.launch(0);
            }
            for rank in &ranks[1..] {
                let late = Err(CudaError::LateRanks { ranks: vec![0], limit });
                assert_eq!(rank.peers.check(&rank.draws()[0]), late);
            }
            // The same rows, as in a retried call.
            ranks[0].peers.set_mark(mark(2));
            ranks[0].launch(0);
            let draws = ranks[0].draws().swap_remove(0);
            let found = ranks[0].peers.check(&draws);
            match is_marked {
                true => assert_eq!(found, Err(CudaError::OtherCall { rank: Some(1), row: Some(0) })),
                // The negative control: without marks, the launches are indistinguishable.
                false => assert_eq!((found, draws[0]), (Ok(()), whole_draw(0, 3, 0))),
            }
        }
    }
}

#[test]
fn a_captured_launch_is_replayed() {
    let _alone = capture_lock();
    const ROWS: usize = 9;
    for devices in placings(2) {
        let mut ranks = ranks(&devices, &[ROWS], LIMIT);
        let capture = |rank: &mut Rank| {
            rank.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            rank.launch(0);
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            rank.stream.end_capture(flags).unwrap().unwrap()
        };
        let graphs: Vec<_> = ranks.iter_mut().map(capture).collect();
        for step in 0..20 {
            for (rank, graph) in ranks.iter_mut().zip(&graphs) {
                let draws: Vec<_> = (0..ROWS).map(|row| shard_draw(step, rank.peers.rank(), row)).collect();
                rank.stream.memcpy_htod(&draws, &mut rank.draws).unwrap();
                graph.launch().unwrap();
            }
            for rank in &ranks {
                let expected: Vec<_> = (0..ROWS).map(|row| whole_draw(step, 2, row)).collect();
                assert_eq!(rank.draws()[0], expected, "rank {}, step {step}", rank.peers.rank());
            }
        }
    }
}

#[test]
fn plans_that_cannot_be_are_refused() {
    for devices in placings(1) {
        let endpoint = |rank, world, rows| PeerEndpoint::new(rank, world, rows, &devices[0]).unwrap_err();
        assert!(matches!(endpoint(0, 33, 1), CudaError::TooLarge { what: "ranks", found: 33, limit: 32 }));
        assert!(matches!(endpoint(2, 2, 1), CudaError::TooLarge { found: 3, limit: 2, .. }));
        assert!(matches!(endpoint(0, 2, 257), CudaError::TooLarge { what: "rows", .. }));
        assert!(matches!(endpoint(0, 2, 0), CudaError::EmptyPlan { knob: Knob::MaxRows }));
        // A mailbox that was dropped.
        let endpoints = [0, 1].map(|rank| PeerEndpoint::new(rank, 2, 1, &devices[0]).unwrap());
        let descriptors = endpoints.each_ref().map(PeerEndpoint::descriptor);
        let [first, second] = endpoints;
        drop(second);
        assert!(matches!(first.connect(&descriptors, LIMIT), Err(CudaError::Rank { rank: 1, .. })));
    }
}
