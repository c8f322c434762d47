//! Messages of another rank: this rank returns results or errors for all bytes.
//!
//! The input edits a valid message. Three bytes are a position and the new byte; the position at the end truncates the
//! message instead. The first byte selects the message (the rank's description or its summary) and the merge.
#![no_main]

use flash_sampling::distributed::{ShardMerge, ShardSampler, Transport, TransportError};
use flash_sampling::reference::{Reference, ReferenceVariant};
use flash_sampling::{Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

const VOCAB: usize = 192;
const PLAN: Plan = Plan { max_rows: 3, max_draws: 3, max_logprobs: Some(2), canonical: false };
const MERGES: [ShardMerge; 2] = [ShardMerge::Winners, ShardMerge::LogMass];

/// Returns these messages as the other rank's, one in each call, and then empty ones. Records the messages of this
/// rank.
struct Script {
    rank: usize,
    others: Vec<Vec<u8>>,
    sent: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Transport for Script {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        2
    }

    fn all_gather(&mut self, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), TransportError> {
        let mut sent = self.sent.lock().unwrap();
        all.resize(2, Vec::new());
        all[self.rank] = mine.to_vec();
        all[1 - self.rank] = self.others.get(sent.len()).cloned().unwrap_or_default();
        sent.push(mine.to_vec());
        Ok(())
    }

    // No call waits.
    fn time_limit(&self) -> Duration {
        Duration::ZERO
    }

    fn set_time_limit(&mut self, _limit: Duration) {}
}

/// Runs the handshake and a call of a rank; returns the messages that it sent.
fn rank(rank: usize, merge: ShardMerge, others: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let weight: Vec<f32> = (0..VOCAB * 2).map(|i| (i % 23) as f32 / 8.0).collect();
    let head = Head::new(Matrix::new(&weight, VOCAB, 2).unwrap()).unwrap();
    let local = Reference::new(head.split(&[0, 64])[rank], PLAN, ReferenceVariant::Tiled);
    let sent = Arc::new(Mutex::new(Vec::new()));
    let transport = Script { rank, others, sent: Arc::clone(&sent) };
    if let Ok(mut sampler) = ShardSampler::new(Box::new(local), transport, merge) {
        let rows = [
            RowParams { draws: 3, logprobs: Some(2), ..RowParams::default() },
            RowParams { seed: 1, draws: 2, without_replacement: merge == ShardMerge::Winners, ..RowParams::default() },
            // Decided in one pass, from the largest logits, moments, masses and frontiers. The merge by log-mass
            // refuses this row.
            RowParams { top_n_sigma: 1.0, epsilon_cutoff: 0.002, draws: 2, ..RowParams::default() },
        ];
        let mut out = Samples::new();
        if sampler.sample(Matrix::new(&[1.0f32, 0.5, 0.25, 1.0, 0.5, 0.5], 3, 2).unwrap(), &rows, &mut out).is_ok() {
            for row in out.iter().flatten() {
                assert!(row.draws.iter().all(|draw| (draw.token as usize) < VOCAB && !draw.score.is_nan()));
                assert!(row.log_z.is_none_or(|z| !z.is_nan()));
            }
        }
    }
    let sent = sent.lock().unwrap();
    sent.clone()
}

/// The valid messages of rank 1 for each merge.
fn valid() -> &'static [Vec<Vec<u8>>; 2] {
    static VALID: OnceLock<[Vec<Vec<u8>>; 2]> = OnceLock::new();
    VALID.get_or_init(|| {
        MERGES.map(|merge| {
            let descriptions = [0, 1].map(|r| rank(r, merge, Vec::new()).remove(0));
            let sent = rank(1, merge, vec![descriptions[0].clone()]);
            assert_eq!(sent.len(), 2, "a description and a summary");
            assert_eq!(rank(0, merge, sent.clone()).len(), 2);
            sent
        })
    })
}

fuzz_target!(|bytes: &[u8]| {
    let Some((pick, edits)) = bytes.split_first() else { return };
    let merge = usize::from(pick & 1);
    let mut messages = valid()[merge].clone();
    let message = &mut messages[usize::from(pick >> 1 & 1)];
    for edit in edits.as_chunks::<3>().0 {
        let place = usize::from(u16::from_le_bytes([edit[0], edit[1]])) % (message.len() + 1);
        match message.get_mut(place) {
            Some(byte) => *byte = edit[2],
            None => message.truncate(usize::from(edit[2])),
        }
    }
    rank(0, MERGES[merge], messages);
});
