//! Assigns draws to launches. A row's draws are divided among copies of its hidden state, and each round of launches
//! makes one draw per copy. So memory does not need a hidden state for each draw.
//!
//! ```text
//! rows a (3 draws), b (1 draw), room for 4 hidden states:  copies  a a b
//!                                              first round of draws  0 1 0
//!                                                       second round  2
//! ```
//! Copies with more draws come first, so the draws of a round use consecutive copies from the first on.

use core::cmp::Reverse;

/// A copy of a row's hidden state on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HiddenCopy {
    /// The row of the hidden state.
    pub(super) row: usize,
    /// The index of its first draw among all draws, and the distance to its next draw.
    first: u32,
    step: u32,
    /// The number of its draws.
    rounds: u32,
}

/// The draws of a call, assigned to copies and rounds.
#[derive(Debug, Default)]
pub(super) struct DrawSchedule {
    pub(super) copies: Vec<HiddenCopy>,
    /// The number of draws of each round.
    pub(super) rounds: Vec<u32>,
    /// The index of each draw among all draws, in launch order.
    pub(super) order: Vec<u32>,
}

impl DrawSchedule {
    /// Assigns the draws of `rows`, which has the number of draws of each row, at least one.
    ///
    /// `room` is the capacity in hidden states, at least the number of rows. There are at most 2^32 - 1 draws.
    pub(super) fn assign(&mut self, rows: impl ExactSizeIterator<Item = (usize, u32)>, room: usize) {
        let max_copies = (room / rows.len().max(1)).max(1) as u32;
        self.copies.clear();
        let mut first = 0;
        for (row, draws) in rows {
            let step = draws.min(max_copies);
            let copy = |j: u32| HiddenCopy { row, first: first + j, step, rounds: (draws - j).div_ceil(step) };
            self.copies.extend((0..step).map(copy));
            first += draws;
        }
        self.copies.sort_unstable_by_key(|copy| (Reverse(copy.rounds), copy.first));
        self.rounds.clear();
        self.order.clear();
        for round in 0..self.copies.first().map_or(0, |copy| copy.rounds) {
            let count = self.copies.partition_point(|copy| copy.rounds > round);
            self.rounds.push(count as u32);
            self.order.extend(self.copies[..count].iter().map(|copy| copy.first + round * copy.step));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_draw_is_made_once_by_its_row_within_the_room() {
        let cases: [(&[u32], usize); 7] = [
            (&[], 5),
            (&[1], 1),
            (&[3, 1], 4),
            (&[700], 256),
            (&[1, 9, 2, 2, 40, 1, 7], 7),
            (&[2; 100], 256),
            (&[5, 300, 1, 1], 256),
        ];
        let mut schedule = DrawSchedule::default();
        for (draws, room) in cases {
            schedule.assign(draws.iter().enumerate().map(|(row, &draws)| (row, draws)), room);
            assert!(schedule.copies.len() <= room, "{draws:?}");
            let total: u32 = draws.iter().sum();
            let mut order = schedule.order.clone();
            order.sort_unstable();
            assert_eq!(order, (0..total).collect::<Vec<_>>(), "{draws:?}");
            assert_eq!(schedule.rounds.iter().sum::<u32>(), total, "{draws:?}");
            assert!(schedule.rounds.is_sorted_by(|a, b| a >= b), "{draws:?}");
            let starts: Vec<u32> = draws.iter().scan(0, |at, d| Some(std::mem::replace(at, *at + d))).collect();
            let mut order = schedule.order.iter();
            for &round in &schedule.rounds {
                for copy in &schedule.copies[..round as usize] {
                    let number = *order.next().unwrap();
                    let own = starts[copy.row]..starts[copy.row] + draws[copy.row];
                    assert!(own.contains(&number), "{draws:?}: draw {number} by row {}", copy.row);
                }
            }
        }
    }

    #[test]
    fn launches_are_as_full_as_the_room() {
        let mut schedule = DrawSchedule::default();
        schedule.assign([(0, 700)].into_iter(), 256);
        assert_eq!(schedule.rounds, [256, 256, 188]);
        schedule.assign((0..256).map(|row| (row, 2)), 256);
        assert_eq!(schedule.rounds, [256, 256]);
    }
}
