//! Assigns draws to launches.
//!
//! A launch makes one draw for each hidden state that it reads. Hidden states on the host are copied for each draw. Hidden
//! states on the device stay in place, so a launch reads neighbouring rows:
//!
//! ```text
//! draws of rows 3, 3, 5:      row 3   row 4   row 5
//!            first launch      0       -       2
//!           second launch      1       -       -
//! ```

use crate::sampler::DrawItem;
use core::ops::Range;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlannedLaunch {
    /// Its part of [`LaunchPlan::slots`].
    pub(super) slots: Range<usize>,
    /// The row of its first slot.
    pub(super) first: usize,
}

/// The launches for the draws of a pass.
#[derive(Debug, Default)]
pub(super) struct LaunchPlan {
    pub(super) launches: Vec<PlannedLaunch>,
    /// The items whose draws the launched rows make. A row without an item makes a draw that is not used.
    pub(super) slots: Vec<Option<usize>>,
}

impl LaunchPlan {
    fn clear(&mut self) {
        self.launches.clear();
        self.slots.clear();
    }

    /// Plans launches of up to `most` draws, one item after the other.
    pub(super) fn plan_copies(&mut self, items: &[DrawItem], most: usize) {
        self.clear();
        self.slots.extend((0..items.len()).map(Some));
        let first = |start: usize| (start, (start + most).min(items.len()));
        let launches = (0..items.len()).step_by(most.max(1)).map(first);
        self.launches.extend(launches.map(|(start, end)| PlannedLaunch { slots: start..end, first: items[start].row }));
    }

    /// Plans launches over up to `most` neighbouring rows, as many launches as the most draws of one of these rows. The
    /// items have ascending rows.
    pub(super) fn plan_neighbours(&mut self, items: &[DrawItem], most: usize) {
        self.clear();
        let mut rest = items;
        while let Some(first) = rest.first().map(|item| item.row) {
            let begin = items.len() - rest.len();
            let (part, after) = rest.split_at(rest.partition_point(|item| item.row < first + most));
            rest = after;
            let count = part[part.len() - 1].row - first + 1;
            let draws_of = || part.chunk_by(|a, b| a.row == b.row);
            for number in 0..draws_of().map(<[_]>::len).max().unwrap_or(0) {
                let start = self.slots.len();
                self.slots.resize(start + count, None);
                let mut at = begin;
                for draws in draws_of() {
                    self.slots[start + draws[0].row - first] = Some(at + number).filter(|_| number < draws.len());
                    at += draws.len();
                }
                self.launches.push(PlannedLaunch { slots: start..start + count, first });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::RowFilters;

    fn items(rows: &[usize]) -> Vec<DrawItem> {
        rows.iter().map(|&row| DrawItem { row, draw: 0, filters: RowFilters::OFF }).collect()
    }

    #[test]
    fn neighbours_share_launches_and_further_draws_take_more() {
        let mut plan = LaunchPlan::default();
        plan.plan_neighbours(&items(&[3, 3, 5, 9]), 4);
        assert_eq!(plan.slots, [Some(0), None, Some(2), Some(1), None, None, Some(3)]);
        let launches = plan.launches.iter().map(|launch| (launch.slots.clone(), launch.first));
        assert_eq!(launches.collect::<Vec<_>>(), [(0..3, 3), (3..6, 3), (6..7, 9)]);
        plan.plan_copies(&items(&[3, 3, 5]), 2);
        assert_eq!(plan.slots, [Some(0), Some(1), Some(2)]);
        assert_eq!(plan.launches.iter().map(|launch| launch.slots.clone()).collect::<Vec<_>>(), [0..2, 2..3]);
        plan.plan_neighbours(&[], 4);
        assert!(plan.launches.is_empty() && plan.slots.is_empty());
    }

    #[test]
    fn every_item_has_one_slot_of_its_row() {
        let rows: Vec<_> = (0..300).flat_map(|r| vec![r; (r * 7 % 5) * (r % 3)]).collect();
        let (items, mut plan) = (items(&rows), LaunchPlan::default());
        for most in [1, 7, 256] {
            plan.plan_neighbours(&items, most);
            let mut seen = vec![0; items.len()];
            for launch in &plan.launches {
                assert!(launch.slots.len() <= most);
                for (row, slot) in (launch.first..).zip(&plan.slots[launch.slots.clone()]) {
                    slot.iter().for_each(|&i| {
                        assert_eq!(items[i].row, row);
                        seen[i] += 1;
                    });
                }
            }
            assert!(seen.iter().all(|&count| count == 1), "{most}");
        }
    }
}
