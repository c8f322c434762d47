//! Tests of the exchange within the fused kernel, with small heads. The draws equal those of the whole head on one GPU,
//! for ranks that exchange within the kernel or by a separate launch. Skipped on other GPUs than Hopper.

use super::*;
use crate::abi::DeviceAddress;
use crate::device::{DeviceHead, DeviceMatrix, DeviceTiled, RowFeatures};
use flash_sampling_core::DType;

const HIDDEN: usize = 64;
const ROWS: usize = 40;
/// Shards of three ranks; the second has fewer granules of tokens than a GPU has blocks.
const STARTS: [usize; 4] = [0, 1500, 1541, 6000];
/// Tokens with a logit of +inf in row 4, in the second and the third shard.
const INFINITE: [usize; 2] = [1520, 5000];

/// Random bf16 numbers between -2 and 2 that use all bits of the significand.
pub(super) fn bf16(seed: u64, count: usize) -> Vec<u16> {
    let float = |i| (word(seed, i) % 4001) as f32 / 1000.0 - 2.0;
    (0..count as u32).map(|i| (float(i).to_bits() >> 16) as u16).collect()
}

/// Weight `[6000, 64]`.
fn weight() -> Vec<u16> {
    let mut weight = bf16(1, STARTS[3] * HIDDEN);
    weight.iter_mut().skip(HIDDEN - 1).step_by(HIDDEN).for_each(|last| *last = 0);
    INFINITE.into_iter().for_each(|token| weight[token * HIDDEN + HIDDEN - 1] = 0x7f00);
    weight
}

/// Hidden states `[40, 64]`.
fn states() -> Vec<u16> {
    let mut states = bf16(2, ROWS * HIDDEN);
    states.iter_mut().skip(HIDDEN - 1).step_by(HIDDEN).for_each(|last| *last = 0);
    states[4 * HIDDEN + HIDDEN - 1] = 0x7f00;
    states
}

/// A shard of the head on a GPU, and its hidden states.
struct Part {
    tiled: DeviceTiled,
    hidden: DeviceMatrix,
    _memory: [CudaSlice<u16>; 2],
}

impl Part {
    /// Creates the shard of rank `rank` of `world`; a world of one has all tokens.
    fn new(rank: usize, world: usize, device: &Arc<Device>, stream: &Arc<CudaStream>) -> Part {
        let tokens = STARTS[rank]..if rank + 1 == world { STARTS[3] } else { STARTS[rank + 1] };
        let copied = |numbers: &[u16]| stream.clone_htod(numbers).unwrap();
        let held = copied(&weight()[tokens.start * HIDDEN..tokens.end * HIDDEN]);
        let states = copied(&states());
        let matrix = |at: &CudaSlice<u16>, rows| DeviceMatrix {
            address: DeviceAddress::of(at, stream).cast(),
            dtype: DType::BF16,
            rows,
            cols: HIDDEN,
            row_stride: HIDDEN,
        };
        let (weight, hidden) = (matrix(&held, tokens.len()), matrix(&states, ROWS));
        let head = DeviceHead { first_token: tokens.start as u32, scale: 0.25, ..DeviceHead::of(weight) };
        // SAFETY: this value holds the weight, and nothing writes to it.
        let mut tiled = unsafe { DeviceTiled::new(head, ROWS, device) }.unwrap();
        tiled.prepare_fan_out().unwrap();
        tiled.prepare(RowFeatures::Any).unwrap();
        stream.synchronize().unwrap();
        Part { tiled, hidden, _memory: [held, states] }
    }
}

/// A shard on a GPU, with the steps of a rank.
struct Shard {
    rank: Rank,
    part: Part,
}

impl Shard {
    /// Launches a shard's draws and their exchange, within the fused kernel or by a second launch.
    fn launch(&mut self, step: usize, is_within: bool) {
        let (at, count) = self.rank.steps[step];
        let rows = self.rank.rows_at.add(at);
        let draws = self.rank.draws_at.add(at);
        let hidden = DeviceMatrix { rows: count, ..self.part.hidden };
        let (stream, peers) = (&self.rank.stream, &mut self.rank.peers);
        // Rows with any features use a second launch.
        let features = if is_within { RowFeatures::Bare } else { RowFeatures::Any };
        // SAFETY: this value holds all memory, for this many rows; one stream; the rows are bare.
        unsafe { self.part.tiled.launch_sharded(stream, &hidden, rows, draws, features, peers) }.unwrap();
    }
}

fn shards(devices: &[Arc<Device>], counts: &[usize], limit: Duration) -> Vec<Shard> {
    let group = DevicePeers::group(devices, ROWS, limit).unwrap();
    let shard = |(rank, peers): (usize, DevicePeers)| {
        let device = peers.device().clone();
        let rank_at = Rank::new(peers, counts);
        let part = Part::new(rank, devices.len(), &device, &rank_at.stream);
        Shard { rank: rank_at, part }
    };
    group.into_iter().enumerate().map(shard).collect()
}

/// The placements of three ranks on GPUs with the Hopper kernel.
pub(super) fn hoppers() -> Vec<Vec<Arc<Device>>> {
    let mut placings = placings(3);
    let all = placings.len();
    placings.retain(|devices| devices.iter().all(|device| device.capability() == (9, 0)));
    if placings.len() < all {
        let _ = writeln!(std::io::stderr(), "skipped: a test of cuda/peers: only the Hopper kernel sends");
    }
    placings
}

/// The draws of the whole head, for every step.
fn expected(device: &Arc<Device>, counts: &[usize]) -> Vec<Vec<Draw>> {
    let mut whole = shards(std::slice::from_ref(device), counts, LIMIT);
    (0..counts.len()).for_each(|step| whole[0].launch(step, false));
    whole[0].rank.draws()
}

#[test]
fn draws_sent_from_within_the_kernel_are_those_of_one_gpu() {
    let _alone = capture_lock();
    let counts: Vec<_> = (0..36).map(|step| [1, 17, 5, 40, 9, 33][step % 6]).collect();
    let is_within: [fn(usize, usize) -> bool; 3] = [|_, _| true, |_, rank| rank % 2 == 1, |step, _| step % 2 == 1];
    for devices in hoppers() {
        let expected = expected(&devices[0], &counts);
        let statuses = |status| expected.iter().flatten().filter(|draw| draw.status == status).count();
        assert!(statuses(status::DRAWN) > 500 && statuses(status::POSITIVE_INFINITY) == 30, "{expected:?}");
        for (case, choose) in is_within.into_iter().enumerate() {
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
fn a_rank_that_reads_late_still_finds_what_left_the_kernel_and_with_one_mailbox_does_not() {
    let _alone = capture_lock();
    let counts = [5; 60];
    for devices in hoppers() {
        let expected = expected(&devices[0], &counts);
        for (turns, limit) in [(2, LIMIT), (1, Duration::from_millis(20))] {
            let mut ranks = shards(&devices, &counts, limit);
            ranks.iter_mut().for_each(|shard| shard.rank.peers.call.turns = turns);
            ranks[1].rank.peers.call.pause = 200_000;
            for shard in &mut ranks {
                (0..counts.len()).for_each(|step| shard.launch(step, true));
            }
            let is_right = ranks.iter().all(|shard| shard.rank.draws() == expected);
            // One mailbox instead of two is the negative control.
            assert_eq!(is_right, turns == 2, "{turns} mailboxes");
        }
    }
}
