//! What is checked of addresses of results and parameters in device memory: a kernel that meets one in the middle of an
//! element ends every later call of the context.

use crate::error::CudaError;

/// Whether the rows of a launch and its draws lie where a kernel can read and write them.
pub(crate) fn check_rows(rows: u64, draws: u64) -> Result<(), CudaError> {
    check("rows", rows, 8)?;
    check("draws", draws, 4)
}

/// Whether an address is a multiple of what its elements are aligned to, 4 or 8.
pub(crate) fn check(what: &'static str, address: u64, alignment: u64) -> Result<(), CudaError> {
    let reason = match alignment {
        4 => "their address is not a multiple of 4",
        _ => "their address is not a multiple of 8",
    };
    if address.is_multiple_of(alignment) { Ok(()) } else { Err(CudaError::Layout { what, reason }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Draw, Row, RowFilters};

    #[test]
    fn an_address_within_an_element_is_named() {
        assert_eq!((align_of::<Row>(), align_of::<Draw>(), align_of::<RowFilters>()), (8, 4, 8));
        assert_eq!(check_rows(4096, 4100), Ok(()));
        assert!(matches!(check_rows(4100, 4096), Err(CudaError::Layout { what: "rows", .. })));
        assert!(matches!(check_rows(0, 2), Err(CudaError::Layout { what: "draws", .. })));
        assert!(matches!(check("log Z", 12, 8), Err(CudaError::Layout { what: "log Z", .. })));
    }
}
