//! Which of the bad logits of several shards is a row's error: a raw one before a transformed one, then the lowest token.

use flash_sampling_core::{RowError, Stage};

/// The error that counts so far. Adding is commutative but for errors that name no token, of which the first counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct First(Option<(Stage, u32, RowError)>);

impl First {
    pub(crate) fn add(&mut self, stage: Stage, error: RowError) {
        let rank = match error {
            RowError::NaN { token } | RowError::PositiveInfinity { token } => (stage, token),
            _ => (Stage::Transformed, u32::MAX),
        };
        if self.0.is_none_or(|(stage, token, _)| rank < (stage, token)) {
            self.0 = Some((rank.0, rank.1, error));
        }
    }

    pub(crate) fn error(self) -> Option<RowError> {
        self.0.map(|(.., error)| error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_raw_logit_counts_before_a_transformed_one_and_then_the_lowest_token() {
        let (nan, inf) = (|token| RowError::NaN { token }, |token| RowError::PositiveInfinity { token });
        let of = |all: &[(Stage, RowError)]| {
            let mut first = First::default();
            all.iter().for_each(|&(stage, error)| first.add(stage, error));
            first.error()
        };
        let all =
            [(Stage::Raw, nan(7)), (Stage::Raw, inf(9)), (Stage::Transformed, inf(2)), (Stage::Transformed, nan(5))];
        for turn in 0..4 {
            let mut all = all;
            all.rotate_left(turn);
            assert_eq!(of(&all), Some(nan(7)));
        }
        assert_eq!(of(&all[2..]), Some(inf(2)));
        assert_eq!(of(&[all[3], all[2]]), Some(inf(2)));
        assert_eq!(of(&[(Stage::Transformed, RowError::NoFiniteLogit), all[3]]), Some(nan(5)));
        assert_eq!(of(&[]), None);
    }
}
