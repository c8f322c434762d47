//! What is checked of addresses of results and parameters in device memory: a kernel that meets one in the middle of an
//! element ends every later call of the context.

use crate::error::CudaError;

/// Whether the rows of a launch and its draws lie where a kernel can read and write them.
pub(crate) fn check_rows(rows: u64, draws: u64) -> Result<(), CudaError> {
    check_by_8("rows", rows)?;
    check_by_4("draws", draws)
}

/// Whether an address is a multiple of 4.
pub(crate) fn check_by_4(what: &'static str, address: u64) -> Result<(), CudaError> {
    let reason = "their address is not a multiple of 4";
    if address.is_multiple_of(4) { Ok(()) } else { Err(CudaError::Layout { what, reason }) }
}

/// Whether an address is a multiple of 8.
pub(crate) fn check_by_8(what: &'static str, address: u64) -> Result<(), CudaError> {
    let reason = "their address is not a multiple of 8";
    if address.is_multiple_of(8) { Ok(()) } else { Err(CudaError::Layout { what, reason }) }
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
        assert!(matches!(check_by_8("log Z", 12), Err(CudaError::Layout { what: "log Z", .. })));
    }
}
