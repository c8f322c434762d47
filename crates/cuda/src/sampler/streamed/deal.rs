//! Which draws are made by which launches: a row's draws are dealt out to copies of its hidden state, and the launches
//! follow each other over the same copies, so that memory does not hold a hidden state for each draw.
//!
//! ```text
//! rows a (3 draws), b (1 draw), room for 4 hidden states:  copies  a a b
//!                                              first layer of draws  0 1 0
//!                                                       second layer  2
//! ```
//! Copies with more draws lie first, so that a layer's are one after the other from the first on.

use core::cmp::Reverse;

/// A hidden state on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copy {
    /// The row whose it is.
    pub(super) row: usize,
    /// Its first draw, as a number among those of all rows, and how far apart the following lie.
    first: u32,
    step: u32,
    /// How many draws it makes.
    layers: u32,
}

/// The draws of a call, dealt out.
#[derive(Debug, Default)]
pub(super) struct Deal {
    pub(super) copies: Vec<Copy>,
    /// Draws of each layer.
    pub(super) layers: Vec<u32>,
    /// The number of each draw among those of all rows, in the order in which they are made.
    pub(super) order: Vec<u32>,
}

impl Deal {
    /// Deals out the draws of `rows`, each with how many it makes, at least one; there is room for `room` hidden states, at
    /// least as many as rows, and no more than 2^32 - 1 draws.
    pub(super) fn deal(&mut self, rows: impl ExactSizeIterator<Item = (usize, u32)>, room: usize) {
        let most = (room / rows.len().max(1)).max(1) as u32;
        self.copies.clear();
        let mut first = 0;
        for (row, draws) in rows {
            let step = draws.min(most);
            let copy = |j: u32| Copy { row, first: first + j, step, layers: (draws - j).div_ceil(step) };
            self.copies.extend((0..step).map(copy));
            first += draws;
        }
        self.copies.sort_unstable_by_key(|copy| (Reverse(copy.layers), copy.first));
        self.layers.clear();
        self.order.clear();
        for layer in 0..self.copies.first().map_or(0, |copy| copy.layers) {
            let count = self.copies.partition_point(|copy| copy.layers > layer);
            self.layers.push(count as u32);
            self.order.extend(self.copies[..count].iter().map(|copy| copy.first + layer * copy.step));
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
        let mut deal = Deal::default();
        for (draws, room) in cases {
            deal.deal(draws.iter().enumerate().map(|(row, &draws)| (row, draws)), room);
            assert!(deal.copies.len() <= room, "{draws:?}");
            let total: u32 = draws.iter().sum();
            let mut order = deal.order.clone();
            order.sort_unstable();
            assert_eq!(order, (0..total).collect::<Vec<_>>(), "{draws:?}");
            assert_eq!(deal.layers.iter().sum::<u32>(), total, "{draws:?}");
            assert!(deal.layers.is_sorted_by(|a, b| a >= b), "{draws:?}");
            let starts: Vec<u32> = draws.iter().scan(0, |at, d| Some(std::mem::replace(at, *at + d))).collect();
            let mut made = deal.order.iter();
            for &layer in &deal.layers {
                for copy in &deal.copies[..layer as usize] {
                    let number = *made.next().unwrap();
                    let own = starts[copy.row]..starts[copy.row] + draws[copy.row];
                    assert!(own.contains(&number), "{draws:?}: draw {number} by row {}", copy.row);
                }
            }
        }
    }

    #[test]
    fn launches_are_as_full_as_the_room() {
        let mut deal = Deal::default();
        deal.deal([(0, 700)].into_iter(), 256);
        assert_eq!(deal.layers, [256, 256, 188]);
        deal.deal((0..256).map(|row| (row, 2)), 256);
        assert_eq!(deal.layers, [256, 256]);
    }
}
