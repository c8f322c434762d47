//! Draws that leave from within the fused kernel, of small heads: they are those of the whole head on one GPU, whoever sends.
//! Only the Hopper kernel sends; skipped on other GPUs.

use super::*;
use crate::device::choice::RowKinds;
use crate::device::head::DeviceHead;
use crate::device::matrix::DeviceMatrix;
use crate::device::tiled::DeviceTiled;
use flash_sampling_core::DType;

const HIDDEN: usize = 64;
const ROWS: usize = 40;
/// Shards of three ranks; the second has fewer granules of tokens than a GPU has blocks.
const STARTS: [usize; 4] = [0, 1500, 1541, 6000];
/// Tokens with a logit that is +inf in row 4, of the second and the third shard.
const INFINITE: [usize; 2] = [1520, 5000];

/// Random numbers of 16 bits as bf16 between -2 and 2, all bits of the significand used.
fn bf16(seed: u64, count: usize) -> Vec<u16> {
    let float = |i| (word(seed, i) % 4001) as f32 / 1000.0 - 2.0;
    (0..count as u32).map(|i| (float(i).to_bits() >> 16) as u16).collect()
}

/// Weight `[6000, 64]` and hidden states `[40, 64]`.
fn factors() -> (Vec<u16>, Vec<u16>) {
    let (mut weight, mut hidden) = (bf16(1, STARTS[3] * HIDDEN), bf16(2, ROWS * HIDDEN));
    weight.iter_mut().skip(HIDDEN - 1).step_by(HIDDEN).for_each(|last| *last = 0);
    hidden.iter_mut().skip(HIDDEN - 1).step_by(HIDDEN).for_each(|last| *last = 0);
    INFINITE.into_iter().for_each(|token| weight[token * HIDDEN + HIDDEN - 1] = 0x7f00);
    hidden[4 * HIDDEN + HIDDEN - 1] = 0x7f00;
    (weight, hidden)
}

/// A shard on a GPU, and the steps of a rank.
struct Shard {
    rank: Rank,
    tiled: DeviceTiled,
    hidden: DeviceMatrix,
    _held: [CudaSlice<u16>; 2],
}

impl Shard {
    fn new(peers: DevicePeers, tokens: core::ops::Range<usize>, counts: &[usize]) -> Shard {
        let (weight, hidden) = factors();
        let device = peers.device().clone();
        let rank = Rank::new(peers, counts);
        let held = [&weight[tokens.start * HIDDEN..tokens.end * HIDDEN], &hidden];
        let held = held.map(|numbers| rank.stream.clone_htod(numbers).unwrap());
        let matrix = |at: &CudaSlice<u16>, rows| DeviceMatrix {
            address: at.device_ptr(&rank.stream).0,
            dtype: DType::BF16,
            rows,
            cols: HIDDEN,
            row_stride: HIDDEN,
        };
        let (weight, hidden) = (matrix(&held[0], tokens.len()), matrix(&held[1], ROWS));
        let head = DeviceHead { weight, first_token: tokens.start as u32, bias: None, soft_cap: None, scale: 0.25 };
        // SAFETY: the weight is held by this value, which nothing writes to.
        let mut tiled = unsafe { DeviceTiled::new(head, ROWS, &device) }.unwrap();
        tiled.prepare_fan_out().unwrap();
        rank.stream.synchronize().unwrap();
        Shard { rank, tiled, hidden, _held: held }
    }

    fn launch(&mut self, step: usize, fan_out: FanOut) {
        let (at, count) = self.rank.steps[step];
        let rows = self.rank.rows_at + (at * size_of::<Row>()) as u64;
        let draws = self.rank.draws_at + (at * size_of::<Draw>()) as u64;
        let hidden = DeviceMatrix { rows: count, ..self.hidden };
        let (stream, peers) = (&self.rank.stream, &mut self.rank.peers);
        peers.set_fan_out(fan_out).unwrap();
        // SAFETY: all of it is held by this value, of as many rows; one stream; the rows are bare.
        unsafe { self.tiled.launch_together(stream, &hidden, rows, draws, RowKinds::Bare, peers) }.unwrap();
    }
}

fn shards(devices: &[Arc<Device>], counts: &[usize], limit: Duration) -> Vec<Shard> {
    let group = DevicePeers::group_with_fan_out(devices, ROWS, limit, FanOut::Blocks).unwrap();
    let tokens = |rank| STARTS[rank]..if devices.len() == 1 { STARTS[3] } else { STARTS[rank + 1] };
    group.into_iter().enumerate().map(|(rank, peers)| Shard::new(peers, tokens(rank), counts)).collect()
}

/// The GPUs of three ranks, where the Hopper kernel runs.
fn hoppers() -> Vec<Vec<Arc<Device>>> {
    let mut placings = placings(3);
    let all = placings.len();
    placings.retain(|devices| devices.iter().all(|device| device.capability() == (9, 0)));
    if placings.len() < all {
        let _ = writeln!(std::io::stderr(), "skipped: a test of cuda/peers: only the Hopper kernel sends");
    }
    placings
}

/// Every step's draws of the whole head.
fn expected(device: &Arc<Device>, counts: &[usize]) -> Vec<Vec<Draw>> {
    let mut whole = shards(std::slice::from_ref(device), counts, LIMIT);
    (0..counts.len()).for_each(|step| whole[0].launch(step, FanOut::Launch));
    whole[0].rank.draws()
}

#[test]
fn draws_sent_from_within_the_kernel_are_those_of_one_gpu() {
    let _alone = alone();
    let counts: Vec<_> = (0..36).map(|step| [1, 17, 5, 40, 9, 33][step % 6]).collect();
    let same: [fn(usize, usize) -> FanOut; 5] = [
        |_, _| FanOut::LastBlock,
        |_, _| FanOut::Blocks,
        |_, rank| [FanOut::Launch, FanOut::LastBlock][rank % 2],
        |step, _| [FanOut::Blocks, FanOut::LastBlock, FanOut::Launch][step % 3],
        |step, _| [FanOut::Launch, FanOut::Blocks][step / 2 % 2],
    ];
    for devices in hoppers() {
        let expected = expected(&devices[0], &counts);
        let statuses = |status| expected.iter().flatten().filter(|draw| draw.status == status).count();
        assert!(statuses(status::DRAWN) > 500 && statuses(status::POSITIVE_INFINITY) == 30, "{expected:?}");
        for (case, choose) in same.into_iter().enumerate() {
            let mut ranks = shards(&devices, &counts, LIMIT);
            for (rank, shard) in ranks.iter_mut().enumerate() {
                (0..counts.len()).for_each(|step| shard.launch(step, choose(step, rank)));
            }
            for shard in &ranks {
                for (step, (found, want)) in shard.rank.draws().iter().zip(&expected).enumerate() {
                    assert_eq!(found, want, "case {case}, rank {}, step {step}", shard.rank.peers.rank());
                }
            }
        }
    }
}

#[test]
fn a_rank_that_reads_blocks_late_still_finds_them_and_with_one_mailbox_does_not() {
    let _alone = alone();
    let counts = [5; 60];
    for devices in hoppers() {
        let expected = expected(&devices[0], &counts);
        for (turns, limit) in [(2, LIMIT), (1, Duration::from_millis(20))] {
            let mut ranks = shards(&devices, &counts, limit);
            ranks.iter_mut().for_each(|shard| shard.rank.peers.call.turns = turns);
            ranks[1].rank.peers.call.pause = 200_000;
            for shard in &mut ranks {
                (0..counts.len()).for_each(|step| shard.launch(step, FanOut::Blocks));
            }
            let is_right = ranks.iter().all(|shard| shard.rank.draws() == expected);
            // One in place of two is the negative control.
            assert_eq!(is_right, turns == 2, "{turns} mailboxes");
        }
    }
}

#[test]
fn a_rank_that_withholds_its_blocks_is_named_within_the_time_limit() {
    let _alone = alone();
    let limit = Duration::from_millis(50);
    for devices in hoppers() {
        for fan_out in [FanOut::LastBlock, FanOut::Blocks] {
            let mut ranks = shards(&devices, &[7; 3], limit);
            ranks.iter_mut().for_each(|shard| shard.launch(0, fan_out));
            ranks.iter().for_each(|shard| shard.rank.stream.synchronize().unwrap());
            let begun = Instant::now();
            // Rank 2 takes part in the first step alone; the last finds the group broken.
            for step in [1, 2] {
                ranks[..2].iter_mut().for_each(|shard| shard.launch(step, fan_out));
            }
            for shard in &ranks[..2] {
                let draws = shard.rank.draws();
                assert_eq!(shard.rank.peers.check(&draws[0]), Ok(()));
                for step in [1, 2] {
                    let found = shard.rank.peers.check(&draws[step]);
                    assert_eq!(found, Err(CudaError::LateRanks { ranks: vec![2], limit }), "{fan_out:?}, step {step}");
                }
            }
            assert!(begun.elapsed() >= limit && begun.elapsed() < 20 * limit, "{:?}", begun.elapsed());
        }
    }
}

#[test]
fn blocks_are_refused_where_no_room_was_planned_for_them() {
    for devices in placings(1) {
        let mut peers = DevicePeers::group(&devices, 1, LIMIT).unwrap().swap_remove(0);
        assert!(matches!(peers.set_fan_out(FanOut::Blocks), Err(CudaError::TooLarge { limit: 0, .. })));
        assert_eq!((peers.set_fan_out(FanOut::LastBlock), peers.fan_out()), (Ok(()), FanOut::LastBlock));
    }
}
